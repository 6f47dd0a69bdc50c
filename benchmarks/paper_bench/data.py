"""The data file: which lines count, and what a finished cell says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data_file import read_lines
from benchmarks.paper_bench.arms import ARMS, ROOT, STARTS
from tba.config import MAX_LATE_SHARE

DATA = ROOT / "docs" / "paper" / "cells.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished cell."""

    world: str
    arm: str
    seed: int
    commit: str
    source: str
    at: str
    result: Mapping[str, Any]

    def value(self, metric: str, version: str = "last") -> float | None:
        """Return a published number of a version; None: unknown, or not measured."""
        evaluation = self.result["evaluations"].get(version)
        return None if evaluation is None else evaluation["metrics"].get(metric, [None])[0]

    @property
    def models(self) -> str:
        """The digest of the weights that the run began with, and of its judges."""
        return self.result["models_sha256"]

    @property
    def is_late(self) -> bool:
        """Whether it was too late at its pace to say anything about the rehearsed GPUs; False without a pace."""
        shares = (self.result.get(name) for name in ("pace_late_share", "trainer_late_share"))
        return any(share is not None and share > MAX_LATE_SHARE for share in shares)

    def attacks(self, name: str, version: str = "last") -> float | None:
        """Return a number of the attacks that succeeded: `num_modes` or `num_effective`."""
        evaluation = self.result["evaluations"].get(version)
        return None if evaluation is None else evaluation["attacks"][name]


def read_cells(path: Path) -> dict[str, Done]:
    """Return the lines that count, by key, the newest of a key; the recipe decides (benchmarks/paper.py)."""
    today = {(arm.world, arm.name): arm.digest() for arm in (*STARTS.values(), *ARMS)}
    found = {}
    for line in read_lines(path):
        if today.get((line["world"], line["arm"])) == line["recipe"]:
            names = ("world", "arm", "seed", "commit", "source", "at", "result")
            found[line["key"]] = Done(**{name: line[name] for name in names})
    return found


def num_other(path: Path) -> int:
    """Return how many lines do not count: of another recipe, or followed by a newer one."""
    return sum(1 for _ in read_lines(path)) - len(read_cells(path))
