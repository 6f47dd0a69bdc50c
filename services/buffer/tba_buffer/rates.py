"""Rates: how fast the cumulative counters have grown over the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tba.api import Rates

WINDOW_S = 60.0
MIN_WINDOW_S = 1.0
NAMES = ("generated", "evicted", "drawn", "trained")


class RateWindow:
    """Samples of cumulative counts, oldest first, of the last WINDOW_S and one before."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def add(self, at_s: float, counts: Mapping[str, int]) -> None:
        """Remember the counts NAMES at `at_s` (a clock that never goes back)."""
        self._samples.append((at_s, {name: counts[name] for name in NAMES}))
        while len(self._samples) > 1 and self._samples[1][0] <= at_s - WINDOW_S:
            self._samples.popleft()

    def rates(self, at_s: float, counts: Mapping[str, int]) -> Rates | None:
        """Growth per second since the oldest sample, or None while less than MIN_WINDOW_S is known.

        A count that went down is that of another Redis: then nothing is known either.
        """
        if not self._samples or at_s - self._samples[0][0] < MIN_WINDOW_S:
            return None
        window_s, before = at_s - self._samples[0][0], self._samples[0][1]
        grown = {name: counts[name] - before[name] for name in NAMES}
        if min(grown.values()) < 0:
            return None
        return Rates(window_s=window_s, **{f"{name}_per_s": number / window_s for name, number in grown.items()})
