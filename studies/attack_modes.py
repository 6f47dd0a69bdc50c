"""Which attacks succeed, in an evaluation of redteam-small: the folder of `tba evaluate` (evaluations/RUN/VERSION).

A family of attacks is found (a mode) where it has at least one success in a hundred.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass
from pathlib import Path

from examples.worlds.redteam.attacks import VULNERABLE, modes_found
from tba.errors import ConfigError
from tba.evaluation.evaluation_job import load_report

TASK = "redteam"
MIN_SHARE = 0.01
"""A family with fewer of the successes does not count as found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one evaluation says."""

    num_attacks: int
    """Samples with a score."""
    num_unknown: int
    """Samples without one: in no other number here."""
    families: dict[str, int]
    """Successful attacks by family."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of each family among the successes."""
        total = sum(self.families.values())
        return {name: count / total for name, count in self.families.items()}

    @property
    def num_modes(self) -> int:
        """Vulnerable families that are found."""
        return sum(share >= MIN_SHARE for name, share in self.shares.items() if name in VULNERABLE)

    @property
    def num_effective(self) -> float:
        """exp(entropy) of the shares; 0 without a success."""
        shares = self.shares.values()
        return math.exp(-sum(share * math.log(share) for share in shares)) if shares else 0.0


def read_cell(folder: Path) -> Cell:
    """Return what the evaluation in a folder says.

    Raises:
        ConfigError: it is no evaluation of red-teaming, or none of its attacks has a score.
    """
    report = load_report(folder / "evaluation.json")
    sampled = report.modes.get("sampled")
    if sampled is None or TASK not in sampled.scores:
        raise ConfigError(
            f"{folder} has no samples of the task {TASK!r}: name an evaluation of examples/worlds/redteam"
        )
    counts = sampled.scores[TASK]
    if report.metrics[f"sampled.{TASK}.success_rate"].value is None:
        raise ConfigError(f"{folder}: none of its attacks has a score ({counts.unknown}); evaluate it again")
    # binary: a line ends at a line feed alone, and texts may hold other separators
    with (folder / "completions.jsonl").open("rb") as file:
        rows = [row for row in map(json.loads, file) if row["mode"] == "sampled"]
    scored = [(row["text"], row["scores"][TASK]) for row in rows if row["scores"].get(TASK) is not None]
    relation, bound = counts.success.split()
    succeeds = {">": operator.gt, ">=": operator.ge}[relation]
    return Cell(
        num_attacks=len(scored),
        num_unknown=counts.num_unknown,
        families=modes_found(text for text, score in scored if succeeds(score, float(bound))),
    )
