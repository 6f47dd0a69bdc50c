"""The recipe, the storage and the clock that every part of this service is built with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tba.config import Recipe
from tba.config.redis import redis_access
from tba.fields import MAX_NUMBER
from tba_buffer.storage.client import BytesRedis, redis_errors
from tba_buffer.storage.damage import DamagedItems, Kind
from tba_buffer.storage.data_loss import LOSS_COUNTERS, Losses
from tba_buffer.storage.durability import DurabilityCheck
from tba_buffer.storage.keys import Keys
from tba_buffer.storage.ownership import Ownership
from tba_buffer.storage.scripts import Scripts

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
        """Wake all who wait."""
        self._event.set()
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Return a ticket for now."""
        return self._event

    async def wait(self, ticket: asyncio.Event, timeout_s: float) -> None:
        """Wait until something has changed since the ticket was taken, at most `timeout_s`."""
        try:
            await asyncio.wait_for(ticket.wait(), timeout_s)
        except TimeoutError:
            return


@dataclass(frozen=True, kw_only=True)
class Context:
    """The recipe, the Redis of the run, and the clock (Unix seconds)."""

    recipe: Recipe
    redis: BytesRedis
    durability: DurabilityCheck
    keys: Keys
    scripts: Scripts
    losses: Losses
    ownership: Ownership
    clock: Callable[[], float] = time.time
    changed: Signal = field(default_factory=Signal)
    mutation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while stored rollouts are changed or removed: by evictor, scorer, rescoring, the end of a snapshot.

    Pushes do not need it. Its holder catches the index up first, so that it sees exactly what it changes.
    """
    damaged_items: DamagedItems = field(default_factory=DamagedItems)
    """Stored items that cannot be read."""

    @classmethod
    def connect(cls, recipe: Recipe, *, clock: Callable[[], float] = time.time) -> Context:
        """Wire the storage of a run. Connections are made with the first command.

        Raises:
            ConfigError: buffer.redis_url is no URL of Redis.
        """
        durability = DurabilityCheck(redis_access(recipe), recipe.buffer.appendfsync)
        keys, owner, damaged_items = Keys(recipe.run.name), Ownership(), DamagedItems()
        losses = Losses(durability.redis, keys, owner, damaged_items, clock=clock)
        return cls(
            recipe=recipe,
            redis=durability.redis,
            durability=durability,
            keys=keys,
            scripts=Scripts(durability, keys, losses),
            losses=losses,
            ownership=owner,
            clock=clock,
            damaged_items=damaged_items,
        )

    def read_or_note(self, kind: Kind, name: str, how: Callable[[], T]) -> T | None:
        """Return what `how` reads; None where it cannot, and then the item is noted as damaged."""
        return self.damaged_items.read(kind, name, how, at_s=self.clock())

    def read_number(self, name: str, value: bytes | str | None, *, lowest: int = 0) -> int:
        """Return a number of the `run` hash; 0 where there is none, or a damaged one, which is noted."""

        def read() -> int:
            number = int(value or 0)
            if not lowest <= number <= MAX_NUMBER:
                raise ValueError(f"it is {number}")
            return number

        return self.read_or_note("run", name, read) or 0

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.recipe.run.name

    async def count(self, name: str, number: int = 1) -> None:
        """Add to one counter; nothing is counted while Redis may have lost data of the run, or may lose it.

        Raises:
            UnavailableError: Redis did not answer.
        """
        # a write would take the place of what a restored Redis has
        if self.durability.broken is None:
            with redis_errors(f"count {name}"):
                await self.redis.hincrby(self.keys.counters, name, number)

    async def counters(self) -> Mapping[str, int]:
        """Return all counters; an absent name has never been counted.

        Raises:
            UnavailableError: Redis did not answer.
        """
        with redis_errors("read the counters"):
            raw = await self.redis.hgetall(self.keys.counters)
        return self.parse_counters(raw)

    def parse_counters(self, raw: Mapping[bytes, bytes]) -> dict[str, int]:
        """Parse a hash of counters. A damaged one is left out, and noted."""
        found: dict[str, int] = {}
        for name, value in raw.items():
            text = name.decode(errors="replace")
            if text in LOSS_COUNTERS:  # as the loss check reads them, which has bounds of its own
                number = self.losses.read_count(text, value)
            else:
                number = self.read_or_note("counter", text, lambda value=value: int(value))
            if number is not None:
                found[text] = number
        return found
