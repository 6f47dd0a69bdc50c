"""The optimizer steps of supervised training, whatever is learned."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tba.config import TrainerSection
from tba.config.supervised import SupervisedSection
from tba.errors import TbaError
from tba_trainer.distributed.process_group import Team
from tba_trainer.learner.learner import Optimizer
from tba_trainer.supervised.checkpoint import Checkpoints, TrainingState
from tba_trainer.supervised.examples import Order

PROGRESS_S = 0.5
"""Least time between two lines of progress."""


class Task(Protocol):
    """What is learned."""

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens of examples."""
        ...

    def divisor(self, rows: Sequence[int]) -> int:
        """Return what the loss of a step is divided by."""
        ...

    def micro_batches(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the rows of each pass of this process."""
        ...

    def loss_sum(self, rows: Sequence[int]) -> Float[Tensor, ""]:
        """Return the loss of the examples of a pass, summed."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out examples."""
        ...


class Training:
    """Optimizer steps over a task.

    Args:
        model: its trainable parameters are updated.
        order: of the examples.
        state: at the beginning of the training; a checkpoint replaces it.
        stop: set when training should end after the current step, with a checkpoint.
    """

    def __init__(
        self,
        task: Task,
        model: Any,
        section: SupervisedSection,
        *,
        order: Order,
        checkpoints: Checkpoints,
        state: TrainingState,
        team: Team,
        stop: threading.Event,
    ) -> None:
        self._task, self._model, self._section, self._order = task, model, section, order
        self._checkpoints, self._team, self._stop = checkpoints, team, stop
        self._optimizer = Optimizer(
            model,
            TrainerSection(
                adam_beta1=section.adam_beta1,
                adam_beta2=section.adam_beta2,
                weight_decay=section.weight_decay,
                max_grad_norm=section.max_grad_norm,
            ),
        )
        self.state = checkpoints.restore(model, self._optimizer, state)
        self._first_step = self.state.step
        self._spent = (self.state.wall_s, self.state.cpu_s)  # before this process
        self._begun = (time.monotonic(), time.process_time())
        self._told_s, self._tokens = self._begun[0], 0

    def run(self) -> bool:
        """Make the steps that are left; return whether all are made. False: `stop` was set, with a checkpoint.

        Raises:
            TbaError: loss or gradient is not finite.
            OSError: the disk is full.
        """
        section, launcher = self._section, os.getppid()
        while self.state.step < section.num_steps:
            rows = self._order.of_step(self.state.step)
            loss, is_stopped = self._step(rows)
            self.state.losses.append(loss)
            self._tokens += self._task.num_tokens(rows)
            is_last = self.state.step == section.num_steps
            found: dict[str, float] = {}
            if is_last or self.state.step % section.eval_every_steps == 0:
                found = self._task.evaluate()
                mean = sum(self.state.losses) / len(self.state.losses)
                point = {"step": self.state.step, "loss": mean, "learning_rate": self._rate(), **found}
                self.state.curve.append(point)
                self.state.losses = []
            self._tell(loss, found, is_last=is_last)
            if is_stopped or is_last or self.state.step % section.checkpoint_interval == 0:
                self._clock()
                self._checkpoints.save(self._model, self._optimizer, self.state)
            if is_stopped and not is_last:
                return False
            if self._team.num_ranks > 1 and os.getppid() != launcher:
                os._exit(1)  # torchrun was killed: its workers are in sessions of their own, and nobody else ends them
        self._clock()
        return True

    def _step(self, rows: Sequence[int]) -> tuple[float, bool]:
        """Make one step; return its loss, and whether a process was told to stop."""
        divisor, loss = self._task.divisor(rows), 0.0
        for each in self._task.micro_batches(rows):
            share = self._task.loss_sum(each) / divisor
            share.backward()
            loss += float(share.detach())
        # whether to stop, too: all processes of a team make the same steps
        told = torch.tensor([loss, float(self._stop.is_set())], dtype=torch.float64)
        loss, num_stopped = self._team.ranks().all_reduce(told).tolist()
        norm = self._optimizer.clip(None)["grad_norm"]
        # a finite loss may have a gradient that is not, which would spoil the weights of the next checkpoint
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if value is None or not math.isfinite(value):
                raise TbaError(
                    f"the {what} of step {self.state.step + 1} is {value}: lower learning_rate or max_grad_norm, or "
                    "warm up longer"
                )
        self._optimizer.apply(learning_rate=self._section.learning_rate.at(self.state.step))
        self.state.step += 1
        return loss, num_stopped > 0

    def _rate(self) -> float:
        """Return the learning rate of the step that was made last."""
        return self._section.learning_rate.at(self.state.step - 1)

    def _clock(self) -> None:
        self.state.wall_s = self._spent[0] + time.monotonic() - self._begun[0]
        self.state.cpu_s = self._spent[1] + time.process_time() - self._begun[1]

    def _tell(self, loss: float, found: dict[str, float], *, is_last: bool) -> None:
        now_s = time.monotonic()
        if not (found or is_last or now_s - self._told_s >= PROGRESS_S):
            return
        step, num_steps = self.state.step, self._section.num_steps
        tell(
            self._team,
            step=step,
            num_steps=num_steps,
            loss=loss,
            learning_rate=self._rate(),
            tokens_per_s=self._tokens / max(now_s - self._told_s, 1e-9),
            **found,
            eta_s=(num_steps - step) * (now_s - self._begun[0]) / (step - self._first_step),
        )
        self._told_s, self._tokens = now_s, 0


def tell(team: Team, **values: Any) -> None:
    """Write a line of progress (leader only)."""
    if team.is_leader:
        print(f"progress: {json.dumps(values)}", file=sys.stderr, flush=True)
