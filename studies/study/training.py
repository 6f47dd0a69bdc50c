"""One training run in one process: rollouts of an older policy, the product's Learner and guards, measured accuracy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tba_trainer.learner.guards import GuardState, check_step, usual_grad_norm
from tba_trainer.learner.learner import Learner
from tba_trainer.learner.schedules import scheduled
from tba_trainer.model.policy import load_policy
from torch import Tensor

from studies.study.cells import Cell, World
from studies.study.methods import METHODS
from studies.study.world import EOS_ID, NUM_TRAIN, TASKS, HeldOut, Problems, Samples, sample
from tba.config import Recipe, parse_recipe
from tba.versions import PolicyVersion
from tba.wire import Batch, Group, Rollout, Sampling, VersionSpan, float32_bytes, int32_bytes

RUN, LINEAGE = "study", 1
EVAL_EVERY_STEPS = 10
BATCH_ROLLOUTS, GROUP_SIZE = 128, 8
GIVE_UP_BELOW = 0.25
"""A run whose sampled accuracy falls below this share of the start's is over: nothing comes back from there."""


@dataclass(slots=True)
class Curve:
    """The measurements of every `EVAL_EVERY_STEPS` steps, step 0 included."""

    step: list[int] = field(default_factory=list)
    sampled: list[float | None] = field(default_factory=list)
    greedy: list[float | None] = field(default_factory=list)
    num_tokens: list[float | None] = field(default_factory=list)
    """Mean length of sampled held-out responses, where they are sampled."""
    ess: list[float | None] = field(default_factory=list)
    """This and the following: mean over the steps since the last point; None at the start."""
    grad_norm: list[float | None] = field(default_factory=list)
    grad_clipped: list[float | None] = field(default_factory=list)
    clipped_share: list[float | None] = field(default_factory=list)
    reward_mean: list[float | None] = field(default_factory=list)
    age: list[float | None] = field(default_factory=list)


def num_steps_of(world: World) -> int:
    """Optimizer steps of a run in it."""
    return world.num_steps or TASKS[world.task].num_steps


def recipe_of(cell: Cell, start: Path) -> Recipe:
    """The product's recipe of a run."""
    return parse_recipe(
        {
            "run": {"name": RUN, "seed": cell.seed},
            "model": {"path": str(start)},
            "data": {"generator": cell.world.task},
            "sampling": {
                "prompts_per_batch": BATCH_ROLLOUTS // GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "rollouts_per_visit": GROUP_SIZE,
            },
            "searcher": {"max_response_tokens": TASKS[cell.world.task].max_response_tokens},
            "objective": {**METHODS[cell.method].objective, "beta": {"value": cell.setting.beta}},
            "trainer": {
                "num_steps": num_steps_of(cell.world),
                "learning_rate": {"kind": "constant", "value": cell.setting.learning_rate, "warmup_steps": 10},
            },
        },
        where="study",
    )


class Behaviour:
    """The policy of `lag` steps ago, in a model of its own (theirs runs packed passes, this one samples)."""

    def __init__(self, twin: Any, lag: int) -> None:
        self._twin, self._lag = twin, lag
        self._past: deque[tuple[int, dict[str, Tensor]]] = deque()

    def at(self, model: Any, num_steps: int) -> tuple[Any, int]:
        """After `num_steps` steps of `model`: the behaviour policy, and the step that made it.

        Call it once after every step: it remembers the weights.
        """
        self._past.append((num_steps, {name: p.detach().clone() for name, p in model.named_parameters()}))
        while len(self._past) > 1 and self._past[1][0] <= num_steps - self._lag:
            self._past.popleft()
        version, tensors = self._past[0]
        return self._load(tensors), version

    def now(self, model: Any) -> Any:
        """`model` as it is."""
        return self._load(dict(model.named_parameters()))

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor]) -> Any:
        for name, parameter in self._twin.named_parameters():
            parameter.copy_(tensors[name])
        return self._twin


def train(cell: Cell, start: Path) -> dict[str, Any]:
    """Run it.

    Returns:
        Curves and totals; `num_steps_done` is less than asked for when theta or the loss was not finite any more, or
        the policy was lost.
    """
    began_s, world = time.process_time(), cell.world
    num_steps = num_steps_of(world)
    torch.manual_seed(cell.seed)
    recipe = recipe_of(cell, start)
    model, twin = (load_policy(recipe.model, device="cpu", gradient_checkpointing=False) for _ in range(2))
    learner = Learner(model, recipe, np.random.default_rng(cell.seed))
    source = Source(cell, Behaviour(twin, world.lag))
    heldout, curve, guards = HeldOut(world.task), Curve(), GuardState()
    recent: list[dict[str, float | None]] = []
    num_clipped, done = 0.0, 0
    _measure(curve, 0, heldout, source.behaviour.now(model), recent)
    for step in range(1, num_steps + 1):
        batch = source.batch(model, step)
        ages = [max(0, step - 1 - rollout.version.step) for rollout in batch.rollouts]
        values = scheduled(recipe, step=step)
        usual = usual_grad_norm(recipe.trainer.guards, guards)
        metrics = learner.gradients(batch, step=step, policy_ages=ages, values=values, usual_grad_norm=usual)
        action = check_step(recipe.trainer.guards, guards, metrics)
        guards = action.state
        if action.skip is not None:
            break
        learner.apply(step=step, lineage=LINEAGE, values=values)
        recent.append({**metrics, "age": float(np.mean(ages))})
        num_clipped += metrics["grad_clipped"] or 0.0
        done = step
        if step % EVAL_EVERY_STEPS == 0:
            _measure(curve, step, heldout, source.behaviour.now(model), recent)
            recent = []
            if (curve.sampled[-1] or 0.0) < GIVE_UP_BELOW * (curve.sampled[0] or 0.0):
                break
    return {
        "num_steps": num_steps,
        "num_steps_done": done,
        "num_generated": source.num_generated,
        "clip_share": round(num_clipped / max(1, done), 4),
        "curve": {name: _rounded(getattr(curve, name)) for name in Curve.__slots__},
        "cpu_s": round(time.process_time() - began_s, 2),
    }


class Source:
    """Makes the batch of every step: new rollouts of the behaviour policy."""

    def __init__(self, cell: Cell, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.num_generated = 0
        self._problems = Problems.of(cell.world.task, "train", NUM_TRAIN, cell.seed)
        self._order = _Order(len(self._problems), cell.seed)
        self._generator = torch.Generator().manual_seed(cell.seed)

    def batch(self, model: Any, step: int) -> Batch:
        """The batch of optimizer step `step`."""
        policy, version = self.behaviour.at(model, step - 1)
        rows = self._order.take(BATCH_ROLLOUTS // GROUP_SIZE)
        limit = self._problems.task.max_response_tokens
        samples = sample(policy, self._problems.prompts[rows], GROUP_SIZE, limit, self._generator)
        groups = make_groups(self._problems, rows, samples, version, first=self.num_generated)
        self.num_generated += len(samples.tokens)
        return Batch(batch_id=f"{step}", deadline_s=0.0, seed=0, log_position=0, groups=tuple(groups))


def make_groups(problems: Problems, rows: list[int], samples: Samples, version: int, *, first: int) -> list[Group]:
    """Scored rollouts of sampled completions, one group per prompt; `first` is the number of the first rollout."""
    num_each = len(samples.tokens) // len(rows)
    groups = []
    for slot, row in enumerate(rows):
        rollouts = []
        for k in range(num_each):
            tokens, logprobs = samples.tokens[slot * num_each + k], samples.logprobs[slot * num_each + k]
            rollouts.append(
                Rollout(
                    rollout_id=(first + slot * num_each + k).to_bytes(16, "big"),
                    run=RUN,
                    task="exact",
                    prompt_id=problems.ids[row],
                    visit_id=f"{first + slot}",
                    prompt_bytes=int32_bytes(problems.prompts[row].numpy()),
                    response_bytes=int32_bytes(tokens),
                    response_text="",
                    finish_reason="stop" if tokens[-1] == EOS_ID else "length",
                    version_spans=(VersionSpan.of(PolicyVersion(LINEAGE, version), 0, len(tokens)),),
                    sampling=Sampling.of(1.0),
                    logprob_bytes=float32_bytes(logprobs),
                    ref_logprob=None,
                    reward=problems.reward(row, tokens.tolist()),
                    reward_status="scored",
                    reward_reason=None,
                    reward_version="study",
                    searcher_id="study",
                    started_at_s=0.0,
                    finished_at_s=0.0,
                )
            )
        groups.append(Group(prompt_id=problems.ids[row], source="recent", fallback=False, rollouts=tuple(rollouts)))
    return groups


class _Order:
    """Prompts in epochs, shuffled again in each."""

    def __init__(self, num: int, seed: int) -> None:
        self._num, self._rng, self._left = num, np.random.default_rng([seed, 1]), []

    def take(self, count: int) -> list[int]:
        """`count` different prompts; what is left of an epoch and is too little for a batch is dropped."""
        if len(self._left) < count:
            self._left = self._rng.permutation(self._num).tolist()
        taken, self._left = self._left[:count], self._left[count:]
        return taken


def _measure(curve: Curve, step: int, heldout: HeldOut, model: Any, recent: list[dict[str, float | None]]) -> None:
    accuracy = heldout.accuracy(model)
    curve.step.append(step)
    curve.sampled.append(accuracy.sampled)
    curve.greedy.append(accuracy.greedy)
    curve.num_tokens.append(accuracy.num_tokens)
    for name in ("ess", "grad_norm", "grad_clipped", "clipped_share", "reward_mean", "age"):
        known = [value for metrics in recent if (value := metrics.get(name)) is not None]
        getattr(curve, name).append(float(np.mean(known)) if known else None)


def _rounded(values: list[Any]) -> list[Any]:
    return [float(f"{value:.4g}") if isinstance(value, float) else value for value in values]
