"""One training run in one process: rollouts of the policy of `lag` steps ago, the product's Learner, exact accuracy."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tba_trainer.learner.learner import Learner
from tba_trainer.learner.schedules import scheduled
from tba_trainer.model.policy import load_policy
from torch import Tensor

from benchmarks.study.replay import Replay
from benchmarks.study.world import HeldOut, Problems, Samples, sample
from tba.config import Recipe, parse_recipe
from tba.versions import PolicyVersion
from tba.wire import Batch, Group, Rollout, Sampling, VersionSpan

RUN, LINEAGE = "study", 1
EVAL_EVERY_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one run, besides its starting model."""

    objective: Mapping[str, Any]
    """The recipe's [objective], beta included."""
    learning_rate: float
    lag: int
    """Optimizer steps between the behaviour policy and theta."""
    seed: int
    num_steps: int
    num_prompts: int = 16
    group_size: int = 8
    most_on_policy_prob: float | None = None
    """None: every rollout is trained on once, in order. Else: a replay buffer keeps all of them and MOP draws."""
    max_grad_norm: float = 1.0
    raw_scale: bool = False
    """Multiply the gradient by 2 / beta^2 and clip after that, as the paper's loss has it (C7)."""
    beta_then: float | None = None
    """Half-way beta jumps to this (C7)."""
    give_up_below: float = 0.0
    """Stop when sampled accuracy is below this share of the start's."""

    def beta_at(self, step: int) -> float:
        """beta of optimizer step `step`."""
        if self.beta_then is not None and step > self.num_steps // 2:
            return self.beta_then
        return float(self.objective["beta"]["value"])


@dataclass(slots=True)
class Curve:
    """The measurements of every `EVAL_EVERY_STEPS` steps, step 0 included."""

    sampled: list[float] = field(default_factory=list)
    greedy: list[float] = field(default_factory=list)
    ess: list[float | None] = field(default_factory=list)
    """Mean over the steps since the last point; None at the start."""
    grad_norm: list[float | None] = field(default_factory=list)
    reward: list[float | None] = field(default_factory=list)
    age: list[float | None] = field(default_factory=list)


def recipe_of(settings: Settings, start: Path) -> Recipe:
    """The product's recipe of a run."""
    return parse_recipe(
        {
            "run": {"name": RUN, "seed": settings.seed},
            "model": {"path": str(start)},
            "data": {"generator": "addition"},
            "sampling": {
                "prompts_per_batch": settings.num_prompts,
                "group_size": settings.group_size,
                "rollouts_per_visit": settings.group_size,
                "most_on_policy_prob": settings.most_on_policy_prob or 0.0,
            },
            "objective": dict(settings.objective),
            "trainer": {
                "num_steps": settings.num_steps,
                "learning_rate": {"kind": "constant", "value": settings.learning_rate, "warmup_steps": 10},
                # the raw scale is clipped here, after the gradient has got it
                "max_grad_norm": 1e9 if settings.raw_scale else settings.max_grad_norm,
            },
        },
        where="study",
    )


class Behaviour:
    """The policy of `lag` steps ago, in a model of its own (theirs runs packed passes, this one samples)."""

    def __init__(self, twin: Any, lag: int) -> None:
        self._twin, self._lag = twin, lag
        self._past: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)

    def at(self, model: Any, num_steps: int) -> tuple[Any, int]:
        """After `num_steps` steps of `model`: the behaviour policy, and the step that made it.

        Call it once after every step: each call remembers the weights.
        """
        self._past.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return self._load(self._past[0]), max(0, num_steps - self._lag)

    def now(self, model: Any) -> Any:
        """`model` as it is."""
        return self._load(dict(model.named_parameters()))

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor]) -> Any:
        for name, parameter in self._twin.named_parameters():
            parameter.copy_(tensors[name])
        return self._twin


def train(settings: Settings, start: Path) -> dict[str, Any]:
    """Run it.

    Returns:
        Curves and totals; `num_steps_done` is less than asked for when theta or the loss was not finite any more.
    """
    began_s = time.process_time()
    torch.manual_seed(settings.seed)
    recipe = recipe_of(settings, start)
    model, twin = (load_policy(recipe.model, device="cpu", gradient_checkpointing=False) for _ in range(2))
    learner = Learner(model, recipe, np.random.default_rng(settings.seed))
    generator = torch.Generator().manual_seed(settings.seed)
    problems = Problems.of("train", 3000, settings.seed)
    order = _Order(len(problems), settings.seed)
    behaviour, heldout, curve = Behaviour(twin, settings.lag), HeldOut(), Curve()
    replay = None if settings.most_on_policy_prob is None else Replay(recipe, seed=settings.seed)
    recent: list[dict[str, float | None]] = []
    done = 0
    _measure(curve, heldout, behaviour.now(model), recent)
    for step in range(1, settings.num_steps + 1):
        policy, version = behaviour.at(model, step - 1)
        rows = order.take(settings.num_prompts)
        samples = sample(policy, problems.prompts[rows], settings.group_size, generator)
        groups = make_groups(problems, rows, samples, version, first=(step - 1) * settings.num_prompts)
        if replay is not None:
            groups = replay.exchange(groups, version)
        batch = Batch(batch_id=f"{step}", deadline_s=0.0, seed=0, log_position=0, groups=tuple(groups))
        ages = [max(0, step - 1 - r.version.step) for r in batch.rollouts]
        values = replace(scheduled(recipe, step=step), beta=settings.beta_at(step))
        metrics = learner.gradients(batch, step=step, policy_ages=ages, values=values)
        if not all(math.isfinite(metrics[name] or 0.0) for name in ("loss", "grad_norm")):
            break
        if settings.raw_scale:
            _rescale(model, 2 / values.beta**2, settings.max_grad_norm)
        learner.apply(step=step, lineage=LINEAGE, values=values)
        recent.append({**metrics, "age": float(np.mean(ages))})
        done = step
        if step % EVAL_EVERY_STEPS == 0:
            _measure(curve, heldout, behaviour.now(model), recent)
            recent = []
            if curve.sampled[-1] < settings.give_up_below * curve.sampled[0]:
                break
    return {
        "num_steps": settings.num_steps,
        "num_steps_done": done,
        "curve": {name: _rounded(getattr(curve, name)) for name in Curve.__slots__},
        "cpu_s": round(time.process_time() - began_s, 2),
    }


def make_groups(problems: Problems, rows: list[int], samples: Samples, version: int, *, first: int) -> list[Group]:
    """Scored rollouts of sampled completions, one group per prompt."""
    num_each = len(samples.tokens) // len(rows)
    groups = []
    for slot, row in enumerate(rows):
        rollouts = []
        for k in range(num_each):
            tokens, logprobs = samples.tokens[slot * num_each + k], samples.logprobs[slot * num_each + k]
            rollouts.append(
                Rollout(
                    rollout_id=((first + slot) * num_each + k).to_bytes(16, "big"),
                    run=RUN,
                    task="exact",
                    prompt_id=problems.ids[row],
                    visit_id=f"{first + slot}",
                    prompt_tokens=problems.prompts[row].numpy().astype(np.int32),
                    response_tokens=tokens,
                    response_text="",
                    finish_reason="stop" if tokens[-1] == 2 else "length",
                    version_spans=(VersionSpan(version=PolicyVersion(LINEAGE, version), start=0, end=len(tokens)),),
                    sampling=Sampling(temperature=1.0),
                    sampler_logprobs=logprobs,
                    ref_logprob=None,
                    reward=float(tuple(tokens.tolist()) == problems.answers[row]),
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


@torch.no_grad()
def _rescale(model: Any, factor: float, max_norm: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm)


def _measure(curve: Curve, heldout: HeldOut, model: Any, recent: list[dict[str, float | None]]) -> None:
    accuracy = heldout.accuracy(model)
    curve.sampled.append(accuracy.sampled)
    curve.greedy.append(accuracy.greedy)
    for name, values in (
        ("ess", curve.ess),
        ("grad_norm", curve.grad_norm),
        ("reward_mean", curve.reward),
        ("age", curve.age),
    ):
        known = [value for metrics in recent if (value := metrics.get(name)) is not None]
        values.append(float(np.mean(known)) if known else None)


def _rounded(values: list[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in values]
