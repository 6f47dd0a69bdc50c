"""Cells: which runs there are, and what each sets in the recipe."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NUM_SEARCHERS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    seed: int
    searchers: int
    lock_step: bool = False
    """Generate for one sync interval, then train for one, never both at once (`sampling.alternate`)."""

    @property
    def name(self) -> str:
        """What the runs of all seeds have in common."""
        return f"searchers-n{self.searchers}-{'lock' if self.lock_step else 'async'}"

    @property
    def key(self) -> str:
        """The cell's name: all that decides its result, but for the settings of the data file and the code."""
        return f"{self.name}-seed{self.seed}"

    def document(self) -> dict[str, Any]:
        """Return the cell as JSON."""
        return asdict(self)

    def changes(self) -> dict[str, Any]:
        """Return the changes of the recipe, by dotted key."""
        return {"searcher.num_searchers": self.searchers, "sampling.alternate": str(self.lock_step).lower()}


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield all cells seed by seed, so that a broken-off run has whole pairs."""
    for seed, searchers, lock_step in itertools.product(seeds, NUM_SEARCHERS, (False, True)):
        yield Cell(seed=seed, searchers=searchers, lock_step=lock_step)
