"""What every part of this service is built with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tba.config import Recipe
from tba_buffer.keys import Keys
from tba_buffer.promise import Promise
from tba_buffer.redis_link import BytesRedis, redis_errors
from tba_buffer.scripts import Scripts


class Signal:
    """Wakes long polls when something they may wait for has changed.

    Example:
        ticket = signal.ticket()    # before looking
        ...look, and find that it is not there yet...
        await signal.wait(ticket, 0.5)    # returns at once if something changed since the ticket was taken
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Something has changed."""
        self._event.set()
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Remembers now."""
        return self._event

    async def wait(self, ticket: asyncio.Event, timeout_s: float) -> None:
        """Until something has changed since the ticket was taken, at most `timeout_s`."""
        try:
            await asyncio.wait_for(ticket.wait(), timeout_s)
        except TimeoutError:
            return


@dataclass(slots=True)
class Replica:
    """Which buffer process owns the run. Scripts that change or remove stored rollouts compare `number` with Redis."""

    number: int = 0
    refused: str | None = None
    """Why this process serves nothing any more, once it has found the number of a newer one."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The recipe, the Redis of the run, and the clock (Unix seconds)."""

    recipe: Recipe
    redis: BytesRedis
    promise: Promise
    keys: Keys
    scripts: Scripts
    clock: Callable[[], float] = time.time
    changed: Signal = field(default_factory=Signal)
    mutating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever changes or removes stored rollouts: evictor, scorer, rescoring, the end of a snapshot. Pushes do
    not need it. Whoever takes it levels the index inside it, so that its view of what it changes is exact."""
    replica: Replica = field(default_factory=Replica)

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.recipe.run.name

    async def counters(self) -> Mapping[str, int]:
        """All counters; a name that is absent has never been counted.

        Raises:
            UnavailableError: Redis did not answer.
        """
        with redis_errors("read the counters"):
            raw = await self.redis.hgetall(self.keys.counters)
        return {name.decode(): int(value) for name, value in raw.items()}
