"""What every part of this service is built with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tba.config import Recipe
from tba.numbers import MAX_NUMBER
from tba_buffer.keys import Keys
from tba_buffer.loss import FOUND_OUT_BY, Losses, Replica
from tba_buffer.promise import Promise
from tba_buffer.redis_link import BytesRedis, redis_errors
from tba_buffer.scripts import Scripts
from tba_buffer.unreadable import Kind, Unreadable

T = TypeVar("T")


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


@dataclass(frozen=True, kw_only=True)
class Context:
    """The recipe, the Redis of the run, and the clock (Unix seconds)."""

    recipe: Recipe
    redis: BytesRedis
    promise: Promise
    keys: Keys
    scripts: Scripts
    losses: Losses
    replica: Replica
    clock: Callable[[], float] = time.time
    changed: Signal = field(default_factory=Signal)
    mutating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever changes or removes stored rollouts: evictor, scorer, rescoring, the end of a snapshot. Pushes do
    not need it. Whoever takes it levels the index inside it, so that its view of what it changes is exact."""
    unreadable: Unreadable = field(default_factory=Unreadable)
    """What is stored and cannot be read."""

    def read_or_note(self, kind: Kind, name: str, how: Callable[[], T]) -> T | None:
        """What `how` reads; None where what is stored cannot be read, and it is noted."""
        return self.unreadable.read(kind, name, how, at_s=self.clock())

    def whole(self, name: str, value: bytes | str | None, *, lowest: int = 0) -> int:
        """A number of the `run` hash; 0 where there is none, or one that cannot be read or be: then it is noted."""

        def read() -> int:
            number = int(value or 0)
            if not lowest <= number <= MAX_NUMBER:
                raise ValueError(f"it is {number}")
            return number

        return self.read_or_note("run", name, read) or 0

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.recipe.run.name

    async def count(self, name: str, number: int = 1) -> None:
        """Add to a counter by itself. Nothing is counted while Redis may have lost data of the run, or may lose it.

        Raises:
            UnavailableError: Redis did not answer.
        """
        if self.promise.broken is None:
            with redis_errors(f"count {name}"):
                await self.redis.hincrby(self.keys.counters, name, number)

    async def counters(self) -> Mapping[str, int]:
        """All counters; a name that is absent has never been counted.

        Raises:
            UnavailableError: Redis did not answer.
        """
        with redis_errors("read the counters"):
            raw = await self.redis.hgetall(self.keys.counters)
        return self.whole_numbers(raw)

    def whole_numbers(self, raw: Mapping[bytes, bytes]) -> dict[str, int]:
        """A hash of counters; one that is no number is left out, and noted."""
        found: dict[str, int] = {}
        for name, value in raw.items():
            text = name.decode(errors="replace")
            if text in FOUND_OUT_BY:  # bounds of their own: what is damaged for the one who refuses is so for everybody
                number = self.losses.whole(text, value)
            else:
                number = self.read_or_note("counter", text, lambda value=value: int(value))
            if number is not None:
                found[text] = number
        return found
