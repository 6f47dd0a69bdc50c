"""Policy versions as small numbers, so that a row needs 4 bytes for one; the live rollouts of each are counted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tba.versions import PolicyVersion


class VersionNumbers:
    """The number of each version that has a live rollout. Numbers of versions without one are given out again."""

    def __init__(self) -> None:
        self._numbers: dict[PolicyVersion, int] = {}
        self._free: list[int] = []
        self._recent: set[PolicyVersion] | None = None
        self.lineages = np.zeros(16, dtype=np.uint32)
        self.steps = np.zeros(16, dtype=np.uint64)
        self.counts = np.zeros(16, dtype=np.int64)
        self.recent = np.ones(16, dtype=bool)
        """[V] by number: lineage, step, live rollouts, and whether it is recent."""

    def number_of(self, lineages: NDArray[np.uint32], steps: NDArray[np.uint64]) -> NDArray[np.int32]:
        """The number of each version (lineages [n], steps [n]); unknown ones get one. [n]"""
        if (lineages == lineages[0]).all() and (steps == steps[0]).all():
            return np.full(len(steps), self._number(int(lineages[0]), int(steps[0])), dtype=np.int32)
        distinct, by_step = np.unique(steps, return_inverse=True)
        keys = lineages.astype(np.uint64) * np.uint64(len(distinct)) + by_step.astype(np.uint64)
        _, at, inverse = np.unique(keys, return_index=True, return_inverse=True)
        numbers = [self._number(int(lineages[i]), int(steps[i])) for i in at]
        return np.array(numbers, dtype=np.int32)[inverse]

    def _number(self, lineage: int, step: int) -> int:
        version = PolicyVersion(lineage, step)
        number = self._numbers.get(version)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            if number >= len(self.counts):
                for name in ("lineages", "steps", "counts", "recent"):
                    column = getattr(self, name)
                    setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
            self._numbers[version] = number
            self.lineages[number], self.steps[number] = lineage, step
            self.recent[number] = self._recent is None or version in self._recent
        return number

    def count(self, numbers: NDArray[np.int32], sign: int) -> None:
        """Rollouts of these versions came (+1) or went (-1)."""
        np.add.at(self.counts, numbers, sign)
        if sign < 0:
            for number in np.unique(numbers[self.counts[numbers] == 0]).tolist():
                del self._numbers[PolicyVersion(int(self.lineages[number]), int(self.steps[number]))]
                self._free.append(number)

    def live(self) -> dict[PolicyVersion, int]:
        """Live rollouts per version, versions ascending."""
        return {version: int(self.counts[number]) for version, number in sorted(self._numbers.items())}

    def set_recent(self, versions: set[PolicyVersion] | None) -> None:
        """Which versions are recent from now on; none: all."""
        self._recent = versions
        self.recent[:] = versions is None
        for version in versions or ():
            if (number := self._numbers.get(version)) is not None:
                self.recent[number] = True
