"""Cells: which runs there are, and what each sets in the recipe."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

KINDS = ("searchers", "replay", "sync")
NUM_SEARCHERS = (1, 2, 4, 8)
REPLAY_SAMPLES_PER_INSERT = (1.0, 2.0, 4.0, 8.0)
REPLAY_M = (0.2, 0.5, 0.8)
REPLAY_SEARCHERS = 1
"""One: at 1:4 the trainer then waits for rollouts, and replay has something to win."""
SYNC_INTERVALS = (1, 4, 16, 64)
SYNC_SEARCHERS = 4
AGE_HALF_LIFE_STEPS = 16.0
"""As in the study."""
PRIORITIES: dict[str, dict[str, Any]] = {
    "off": {"sampling.reward_inverse_temperature": 0.0, "sampling.uniform_share": 0.0},
    "reward": {
        "sampling.reward_inverse_temperature": 2.0,
        "sampling.uniform_share": 0.2,
        "sampling.prioritise": "across",
    },
    "age": {
        "sampling.reward_inverse_temperature": 0.0,
        "sampling.uniform_share": 0.0,
        "sampling.age_half_life_steps": AGE_HALF_LIFE_STEPS,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run; None leaves what the recipe says."""

    kind: Literal["searchers", "replay", "sync"]
    seed: int
    searchers: int
    lock_step: bool = False
    """Generate for one sync interval, then train for one, never both at once (`sampling.alternate`)."""
    samples_per_insert: float | None = None
    most_on_policy_prob: float | None = None
    priority: str | None = None
    sync_interval: int | None = None

    @property
    def name(self) -> str:
        """What the runs of all seeds have in common."""
        parts = [self.kind, f"n{self.searchers}"]
        if self.kind == "searchers":
            parts.append("lock" if self.lock_step else "async")
        if self.samples_per_insert is not None:
            parts.append(f"spi{self.samples_per_insert:g}")
        if self.most_on_policy_prob is not None:
            parts.append(f"m{self.most_on_policy_prob:g}")
        if self.priority is not None:
            parts.append(self.priority)
        if self.sync_interval is not None:
            parts.append(f"k{self.sync_interval}")
        return "-".join(parts)

    @property
    def key(self) -> str:
        """The cell's name: all that decides its result, but for the settings of the data file and the code."""
        return f"{self.name}-seed{self.seed}"

    def document(self) -> dict[str, Any]:
        """Return the cell as JSON."""
        return asdict(self)

    def changes(self) -> dict[str, Any]:
        """Return the changes of the recipe, by dotted key."""
        found: dict[str, Any] = {
            "searcher.num_searchers": self.searchers,
            "sampling.alternate": str(self.lock_step).lower(),
            "sampling.samples_per_insert": self.samples_per_insert,
            "sampling.most_on_policy_prob": self.most_on_policy_prob,
            "trainer.sync_interval": self.sync_interval,
            **(PRIORITIES[self.priority] if self.priority is not None else {}),
        }
        return {key: value for key, value in found.items() if value is not None}


def cells(kinds: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield all cells seed by seed, so that a broken-off run has whole pairs."""
    for seed in seeds:
        if "searchers" in kinds:
            for searchers, lock_step in itertools.product(NUM_SEARCHERS, (False, True)):
                yield Cell(kind="searchers", seed=seed, searchers=searchers, lock_step=lock_step)
        if "replay" in kinds:
            for ratio, m, priority in itertools.product(REPLAY_SAMPLES_PER_INSERT, REPLAY_M, PRIORITIES):
                yield Cell(
                    kind="replay",
                    seed=seed,
                    searchers=REPLAY_SEARCHERS,
                    samples_per_insert=ratio,
                    most_on_policy_prob=m,
                    priority=priority,
                )
        if "sync" in kinds:
            for interval in SYNC_INTERVALS:
                yield Cell(kind="sync", seed=seed, searchers=SYNC_SEARCHERS, sync_interval=interval)
