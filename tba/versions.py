"""Policy versions, lineages and policy age (docs/architecture.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tba.errors import MalformedError

_TEXT = re.compile(r"^(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,11})$")


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """One set of weights: which start of the trainer, which optimizer step. `(0, 0)` is the starting model."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Parse the text `lineage-step`; raise MalformedError if it has another form."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise MalformedError(f"policy version {text!r} is not of the form LINEAGE-STEP, for example 1-40")
        return cls(int(match[1]), int(match[2]))


START = PolicyVersion(0, 0)
"""The starting model."""


class LineageTree:
    """The tree of lineages: which version each lineage started from.

    Args:
        parents: lineage -> the version that it started from. Lineage 0 has no entry.
    """

    def __init__(self, parents: Mapping[int, PolicyVersion] | None = None) -> None:
        self._parents: dict[int, PolicyVersion] = {}
        for lineage, parent in sorted((parents or {}).items()):
            self.add(lineage, parent)

    @property
    def parents(self) -> dict[int, PolicyVersion]:
        """Lineage -> the version that it started from, as a copy."""
        return dict(self._parents)

    def add(self, lineage: int, parent: PolicyVersion) -> None:
        """Record that `lineage` started from `parent`, which must be of an older lineage."""
        # with it `ancestry` ends: every step of the way goes to an older lineage
        if parent.lineage >= lineage:
            raise MalformedError(f"lineage {lineage} cannot start from {parent}: a parent is an older lineage")
        self._parents[lineage] = parent

    def ancestry(self, version: PolicyVersion) -> list[PolicyVersion]:
        """Return `version`, then the version that its lineage started from, and so on back to the oldest lineage."""
        path = [version]
        while path[-1].lineage in self._parents:
            path.append(self._parents[path[-1].lineage])
        return path

    def policy_age(self, rollout: PolicyVersion, trainer: PolicyVersion) -> int:
        """Return the number of optimizer steps between a rollout's weights and the trainer's, never below 0.

        Across lineages, count from min(the rollout's step, the step at which the two lineages diverged).
        """
        last_step = {v.lineage: v.step for v in self.ancestry(trainer)}
        # lineages without a common ancestor share the starting model alone
        parted = 0
        for version in self.ancestry(rollout):
            if version.lineage in last_step:
                parted = min(version.step, last_step[version.lineage])
                break
        # a rollout of a lineage that was abandoned may be ahead of a trainer that resumed earlier
        return max(0, trainer.step - min(rollout.step, parted))
