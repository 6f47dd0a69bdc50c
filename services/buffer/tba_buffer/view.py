"""Keeps the index level with the log, and rebuilds it from base and tail when the log is not what it was."""

from __future__ import annotations

import asyncio

from tba.errors import SupersededError, UnavailableError
from tba.logs import get_logger
from tba_buffer.base import read_base, read_head
from tba_buffer.coalesce import Coalesced
from tba_buffer.context import Context
from tba_buffer.index import Index, IndexSettings, LogGapError
from tba_buffer.log import Event, RolloutsAdded, parse_entries
from tba_buffer.redis_link import redis_errors

ENTRIES_PER_READ = 1000
NUM_BUILDS = 5
Entry = tuple[bytes, dict[bytes, bytes]]
log = get_logger("view")


class IndexView:
    """The index of this run; `level` reads what the log has gained since.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = IndexSettings.of(context.recipe)
        self._reading = Coalesced(self._read, asyncio.Lock())
        self.index = Index(self._settings)
        self._last: Entry | None = None
        """The last entry that is in the index: the log still has it, unless Redis lost what it had."""

    async def level(self) -> Index:
        """The index, with every push in it that was acknowledged before the call.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or what it has is not a whole log.
        """
        if self._context.replica.refused is not None:
            raise SupersededError(self._context.replica.refused)
        await self._reading.run()
        return self.index

    async def _read(self) -> None:
        if self.index.position:
            try:
                self._last = await self._read_tail(self.index, self._last)
                return
            except LogGapError as error:
                log.warning("index_rebuilt", reason=str(error))
        await self._build()

    async def _build(self) -> None:
        """A new index from base and tail. Another base may be switched to meanwhile: then from the start."""
        problem = ""
        for _ in range(NUM_BUILDS):
            index, head, end = Index(self._settings), await read_head(self._context), await self._log_end()
            if head.generation:
                base = await read_base(self._context, head)
                if base is None:
                    problem = f"pieces of base {head.generation} are missing"
                    continue
                index.restore(base)
            try:
                last = await self._read_tail(index, None)
            except LogGapError as error:
                problem = str(error)
                continue
            if index.position >= end:
                self.index, self._last = index, last
                return
            problem = f"the entries end at {index.position}, but {end} was given out"
        raise UnavailableError(
            f"the log of run {self._context.run!r} in Redis is not whole ({problem}); restore Redis from a copy, or "
            "load a saved buffer into a new run"
        )

    async def _log_end(self) -> int:
        with redis_errors("read the log position"):
            return int(await self._context.redis.hget(self._context.keys.counters, "log_position") or 0)

    async def _read_tail(self, index: Index, last: Entry | None) -> Entry | None:
        """Apply what comes after the index.

        Args:
            index: it is levelled.
            last: its last entry; None when the index is fresh, empty or from a base.

        Returns:
            Its last entry now; None when the log does not have it.

        Raises:
            LogGapError: the log does not continue where the index ends.
        """
        while True:
            position = index.position
            with redis_errors("read the log"):
                entries: list[Entry] = await self._context.redis.xrange(
                    self._context.keys.log, f"{position}-0", "+", ENTRIES_PER_READ
                )
            num_read = len(entries)
            if last is not None and entries[:1] != [last]:
                raise LogGapError(f"the log has another entry at {position} than was read there, or none")
            if entries and entries[0][0] == b"%d-0" % position:
                last = entries.pop(0)
            events = parse_entries(entries)
            if events:
                if not position and first_position(events[0]) != 1:
                    raise LogGapError(f"the log begins at {first_position(events[0])} and there is no base")
                index.apply_many(events)
                last = entries[-1]
            if num_read < ENTRIES_PER_READ:
                return last


def first_position(event: Event) -> int:
    """The first position that an event takes."""
    return event.first_position if isinstance(event, RolloutsAdded) else event.position
