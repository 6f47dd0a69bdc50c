"""Requests without a known token, by address: counted, logged now and then, and answered ever later.

Whoever sends a known token is never held up here, whatever else comes from its address: behind a proxy or a gateway,
good and bad clients share one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from tba.logs import get_logger

WINDOW_S = 60.0
"""Refusals of one address are forgotten after this time without one."""
FREE_REFUSALS = 20
"""So many are answered at once: a person who tries, a client that was given the wrong file."""
HOLD_S = 1.0
"""Every later one is answered after this time, which bounds what one connection can ask for."""
MAX_HELD = 256
"""Answers that are held back at once, of all addresses; beyond it they go out at once, and end the connection."""
MAX_ADDRESSES = 4096
"""Addresses that are remembered; the one that was quiet for longest is forgotten first."""
LOG_EVERY_S = 60.0
log = get_logger("auth")


@dataclass(slots=True)
class _Stranger:
    num_refused: int = 0
    num_not_logged: int = 0
    last_s: float = 0.0
    next_log_s: float = 0.0


class Strangers:
    """What is known of addresses from which requests without a known token came.

    Args:
        registry: where the count is shown.
        clock: monotonic seconds.
    """

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_address: OrderedDict[str, _Stranger] = OrderedDict()
        self._num_held = 0
        self._clock = clock
        self._refused = Counter("tba_unauthorized_total", "Requests without a known token", registry=registry)

    @property
    def is_flooded(self) -> bool:
        """Whether so many answers are held back already that this one cannot be."""
        return self._num_held >= MAX_HELD

    async def hold_up(self, address: str) -> None:
        """Count a refusal, and return when it may be answered."""
        self._refused.inc()
        if self._note(address) <= FREE_REFUSALS or self.is_flooded:
            return
        self._num_held += 1
        try:
            await asyncio.sleep(HOLD_S)
        finally:
            self._num_held -= 1

    def _note(self, address: str) -> int:
        """How many requests of this address were refused lately, this one included."""
        now_s = self._clock()
        stranger = self._by_address.setdefault(address, _Stranger())
        self._by_address.move_to_end(address)
        if len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        if now_s - stranger.last_s > WINDOW_S:
            stranger.num_refused = 0
        stranger.last_s = now_s
        stranger.num_refused += 1
        stranger.num_not_logged += 1
        if now_s >= stranger.next_log_s:
            log.warning("unauthorized", client=address, requests=stranger.num_not_logged)
            stranger.num_not_logged, stranger.next_log_s = 0, now_s + LOG_EVERY_S
        return stranger.num_refused
