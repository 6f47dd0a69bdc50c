"""How often searchers that wait for work may ask: hundreds of them together leave the buffer time for its work."""

from __future__ import annotations

from collections import OrderedDict

MIN_RETRY_S = 0.25
MAX_RETRY_S = 10.0
MAX_ASKS_PER_S = 100.0
"""All waiting searchers together. One ask in vain costs the buffer about 1 ms, so this is a tenth of its one core."""


class Askers:
    """Knows who asked in vain lately."""

    def __init__(self) -> None:
        self._asked_at_s: OrderedDict[str, float] = OrderedDict()  # the one who asked longest ago first

    def in_vain(self, searcher_id: str, now_s: float) -> float:
        """Note that this searcher got nothing; seconds after which it may ask again.

        Args:
            searcher_id: who.
            now_s: of a clock that does not jump.
        """
        self._asked_at_s[searcher_id] = now_s
        self._asked_at_s.move_to_end(searcher_id)
        retry_s = min(max(MIN_RETRY_S, len(self._asked_at_s) / MAX_ASKS_PER_S), MAX_RETRY_S)
        # whoever has not asked for so long is gone, or busy elsewhere
        while next(iter(self._asked_at_s.values())) < now_s - 2 * retry_s - 1.0:
            self._asked_at_s.popitem(last=False)
        return retry_s

    def served(self, searcher_id: str) -> None:
        """This searcher got work: it waits no more."""
        self._asked_at_s.pop(searcher_id, None)
