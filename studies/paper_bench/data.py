"""The data file: which lines count, and what a finished cell says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.worlds.redteam.attacks import VULNERABLE
from studies.data_file import read_lines
from studies.pace import MAX_LATE_SHARE
from studies.paper_bench.arms import ARMS, ROOT, STARTS

DATA = ROOT / "docs" / "paper" / "cells.jsonl"
Unit = tuple[str, int]
"""Digest of the models, seed. Another processor rounds otherwise and makes other models from the same recipe, with
other scores at the start: runs are compared with runs that began from the same ones."""


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
    def unit(self) -> Unit:
        """What a run is paired by: the digest of the weights that it began with and of its judges, and its seed."""
        return self.result["models_sha256"], self.seed

    @property
    def is_late(self) -> bool:
        """Whether it was too late at its pace to say anything about the rehearsed GPUs; False without a pace."""
        shares = (self.result.get(name) for name in ("pace_late_share", "trainer_late_share"))
        return any(share is not None and share > MAX_LATE_SHARE for share in shares)

    def attacks(self, name: str, version: str = "last") -> float | None:
        """Return a number of the attacks that succeeded: `num_modes` or `num_effective`."""
        evaluation = self.result["evaluations"].get(version)
        return None if evaluation is None else evaluation["attacks"][name]

    def families_among(self, num_attacks: int, version: str = "last") -> float | None:
        """Return how many vulnerable families have a success among so many attacks of a version, in expectation.

        The attacks are drawn from the evaluated ones without replacement: rarefaction (Hurlbert, 1971), here with the
        failures as one more class that does not count. None: not measured, or fewer attacks have a score.
        """
        evaluation = self.result["evaluations"].get(version)
        if evaluation is None or evaluation["attacks"]["num_attacks"] < num_attacks:
            return None
        attacks = evaluation["attacks"]
        draws = math.comb(attacks["num_attacks"], num_attacks)
        counts = (count for family, count in attacks["families"].items() if family in VULNERABLE)
        return sum(1 - math.comb(attacks["num_attacks"] - count, num_attacks) / draws for count in counts)


def read_cells(path: Path) -> dict[tuple[str, str], Done]:
    """Return the lines that count, by key and digest of the models, the newest of each; the recipe decides
    (studies/paper.py)."""
    today = {(arm.world, arm.name): arm.digest() for arm in (*STARTS.values(), *ARMS)}
    found = {}
    for line in read_lines(path):
        if today.get((line["world"], line["arm"])) == line["recipe"]:
            names = ("world", "arm", "seed", "commit", "source", "at", "result")
            done = Done(**{name: line[name] for name in names})
            found[line["key"], done.unit[0]] = done
    return found


def num_other(path: Path) -> int:
    """Return how many lines do not count: of another recipe, or followed by a newer one."""
    return sum(1 for _ in read_lines(path)) - len(read_cells(path))
