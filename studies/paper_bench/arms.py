"""Worlds and arms: which runs there are, what each changes in the recipe of its world, and their order.

Rivals have one setting each, their own KL weight, and are not tuned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.config.recipe import Recipe
from tba.config.recipe_file import parse_recipe, read_document

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)
START = "start"
"""The arm that trains nothing: the published evaluation of the starting model."""
CONTROL: dict[str, Any] = {"trainer.shuffle_rewards": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One of the small recipes, and what is measured in it."""

    name: str
    metric: str
    """The published metric that claims compare, by its name in evaluation.json."""
    middle_steps: tuple[int, ...]
    """Versions that are evaluated besides the last one."""

    @property
    def recipe(self) -> Path:
        """The file of the recipe."""
        return ROOT / "examples" / "worlds" / self.name / f"{self.name}-small.toml"


WORLDS = {
    world.name: world
    for world in (
        World(name="redteam", metric="sampled.redteam.success_rate", middle_steps=(40, 80)),
        World(name="gsm8k", metric="sampled.gsm8k.success_rate", middle_steps=(50,)),
        World(name="math", metric="sampled.math.success_rate", middle_steps=(50,)),
        World(name="tldr", metric="sampled.tldr_win_rate.mean_reward", middle_steps=(40,)),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train in a world."""

    world: str
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """New values of the recipe by dotted key, whole sections too; None removes the key."""
    is_paced: bool = False
    """Whether engines and trainer have the pace of GPUs (`PACE_TOKENS_PER_S`, `PACE_STEP_S`)."""

    @property
    def lag_steps(self) -> int | None:
        """The constant lag; None: the data has a spread of ages."""
        return self.changes.get("sampling.lag_steps")

    def document(self, seed: int) -> dict[str, Any]:
        """Return the recipe of a run: that of the world with the changes, all versions kept, and a name of its own."""
        found = read_document(WORLDS[self.world].recipe)
        every = {"run.name": f"paper-{self.world}-{self.name}-seed{seed}", "run.seed": seed}
        # the versions in between are evaluated after the run, and lags reach back
        every |= {"trainer.keep_versions": 1_000_000, "trainer.export": False}
        for key, value in {**self.changes, **every}.items():
            *sections, last = key.split(".")
            at = found
            for section in sections:
                at = at.setdefault(section, {})
            if value is None:
                at.pop(last, None)
            else:
                at[last] = value
        return found

    def recipe(self, seed: int = 0) -> Recipe:
        """Return the recipe of a run, checked.

        Raises:
            ConfigError: a change is none that the recipe can have.
        """
        return parse_recipe(self.document(seed), where=f"{self.world}/{self.name}")

    def models(self) -> tuple[str, ...]:
        """Return the folders of the models that the recipe begins with, in order."""
        return tuple(sorted(item.path for item in self.recipe().prepare))

    def digest(self) -> str:
        """Return the digest of everything in the recipe that is not a default, but for name and seed of the run.

        Defaults are left out so that a new key does not make old cells worthless; a changed default is a change of
        code, which the commit of a line shows.
        """
        document = self.recipe().model_dump(mode="json", exclude_defaults=True)
        del document["run"]
        if self.is_paced:
            document["searcher"]["pace_tokens_per_s"] = PACE_TOKENS_PER_S
            document["trainer"]["pace_step_s"] = PACE_STEP_S
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    arm: Arm
    seed: int

    @property
    def key(self) -> str:
        """The cell's name."""
        return f"{self.arm.world}/{self.arm.name}/seed{self.seed}"


def constant_lag(steps: int, batch_rollouts: int) -> dict[str, Any]:
    """Return the changes for rollouts that are all exactly so many steps old, each trained once."""
    return {
        "sampling.alternate": True,
        "sampling.lag_steps": steps,
        "sampling.most_on_policy_prob": 1.0,
        "sampling.reward_inverse_temperature": 0.0,
        "sampling.samples_per_insert": 1.0,
        "sampling.min_size_to_sample": batch_rollouts,
        "trainer.sync_interval": 1,
        "trainer.prefetch_batches": 0,
        "buffer.max_policy_age_steps": None,
        "buffer.deduplicate": False,
    }


def _redteam() -> Iterator[Arm]:
    # a reward maximiser on the data of its own policy: no KL, no replay, no filter (docs/results.md)
    maximiser = {
        "sampling.most_on_policy_prob": 1.0,
        "sampling.reward_inverse_temperature": 0.0,
        "searcher.temperature_mix": None,
        "buffer.deduplicate": False,
        "buffer.near_duplicate_share": None,
    }
    # without flow control, as the paper's: at one pace, N searchers fill the buffer N times as fast
    paced = {
        "sampling.samples_per_insert": None,
        # a searcher would have less time for training rollouts where there is only one
        "eval.every_steps": 1_000_000,
        "eval.num_samples": 4,
    }
    arms: dict[str, dict[str, Any]] = {
        "tb": {},
        "control": CONTROL,
        "reinforce": {**maximiser, "objective": {"preset": "reinforce"}},
        "grpo": {**maximiser, "objective": {"preset": "grpo"}},
        "uniform": {"sampling.reward_inverse_temperature": 0.0},
        "no-filter": {"buffer.near_duplicate_share": None},
        **{f"paced-{number}": {**paced, "searcher.num_searchers": number} for number in (1, 4)},
    }
    yield from _arms("redteam", arms)


PACE_TOKENS_PER_S, PACE_STEP_S = 100.0, 1.5
"""Red-teaming at the pace of GPUs: one searcher makes a batch in about eight steps of the trainer, so that two train a
rollout about four times, as the recipe does. So slow that four searchers and the victim fit on two cores (the columns
`late` of the table)."""


def _tldr() -> Iterator[Arm]:
    rivals = {"rloo": 0.05, "online_dpo": 0.1, "ppo_clip": 0.05}
    arms: dict[str, dict[str, Any]] = {"tb": {}, "control": CONTROL}
    arms |= {
        f"{name}-lag{lag}": {"objective": {"preset": name, "beta": kl}, **constant_lag(lag, 160)}
        for lag in (15, 1)
        for name, kl in rivals.items()
    }
    arms |= {f"tb-beta{final:g}": {"objective.beta.final": final} for final in (0.2, 0.0125)}
    yield from _arms("tldr", arms)


def _math() -> Iterator[Arm]:
    dr_grpo = {"objective": {"preset": "dr_grpo"}}
    arms: dict[str, dict[str, Any]] = {
        "tba_prime": {},
        "control": CONTROL,
        "dr_grpo-lag0": {**dr_grpo, **constant_lag(0, 128)},
        "tba_prime-lag10": constant_lag(10, 128),
        "dr_grpo-lag10": {**dr_grpo, **constant_lag(10, 128)},
        "tba_prime-lag2": constant_lag(2, 128),
        "tba_prime_published-lag10": {
            "objective.preset": "tba_prime_published",
            # the trainer keeps the weights that the oldest rollouts were made with
            "objective.old_policy_versions": 12,
            **constant_lag(10, 128),
        },
    }
    yield from _arms("math", arms)


def _gsm8k() -> Iterator[Arm]:
    # as a synchronous trainer: generate one batch, train on it, never both at once
    lock_step = {
        "objective": {"preset": "grpo"},
        "sampling.alternate": True,
        "sampling.rollouts_per_visit": 20,
        "sampling.most_on_policy_prob": 1.0,
        "sampling.min_size_to_sample": 140,
        "trainer.sync_interval": 1,
        "trainer.prefetch_batches": 0,
    }
    published = {"kind": "linear", "value": 0.012, "final": 0.004, "steps": 75}
    arms: dict[str, dict[str, Any]] = {
        "tba_prime": {},
        "control": CONTROL,
        "grpo-lockstep": lock_step,
        "tb-published-beta": {"objective": {"preset": "tb", "beta": published}},
        "m0.5": {"sampling.most_on_policy_prob": 0.5},
    }
    yield from _arms("gsm8k", arms)


def _arms(world: str, arms: Mapping[str, Mapping[str, Any]]) -> Iterator[Arm]:
    for name, changes in arms.items():
        yield Arm(world=world, name=name, changes=changes, is_paced=name.startswith("paced-"))


ARMS = (*_redteam(), *_gsm8k(), *_math(), *_tldr())
STARTS = {name: Arm(world=name, name=START) for name in WORLDS}


def plan(worlds: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield all cells: the starting models, then the first seed of every arm, its other seeds."""
    for world in worlds:
        yield Cell(arm=STARTS[world], seed=0)
    for seed in seeds:
        yield from (Cell(arm=arm, seed=seed) for arm in ARMS if arm.world in worlds)
