"""Keeps the index level with the log, and rebuilds it when the log is not what it was."""

from __future__ import annotations

import asyncio

from tba.logs import get_logger
from tba_buffer.context import Context
from tba_buffer.index import Index, LogGapError
from tba_buffer.log import parse_entry
from tba_buffer.redis_link import redis_errors

ENTRIES_PER_READ = 1000
log = get_logger("view")


class IndexView:
    """The index of this run; `level` reads what the log has gained since.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self.index = self._fresh()

    def _fresh(self) -> Index:
        return Index(num_marks_kept=num_marks_kept(self._context.recipe.sampling.recent_versions))

    async def level(self) -> Index:
        """The index, with every acknowledged push in it.

        Raises:
            UnavailableError: Redis did not answer.
        """
        async with self._lock:
            try:
                await self._read()
            except LogGapError as error:
                log.warning("index_rebuilt", reason=str(error))
                self.index = self._fresh()
                await self._read()
            return self.index

    async def _read(self) -> None:
        context = self._context
        while True:
            with redis_errors("read the log"):
                async with context.redis.pipeline(transaction=True) as pipe:
                    pipe.hget(context.keys.counters, "log_position")
                    pipe.xrange(context.keys.log, f"({self.index.position}-0", "+", ENTRIES_PER_READ)
                    end, entries = await pipe.execute()
            if int(end or 0) < self.index.position:
                raise LogGapError(f"the log ends at {int(end or 0)}, the view at {self.index.position}")
            for entry_id, fields in entries:
                self.index.apply(parse_entry(entry_id, fields))
            if len(entries) < ENTRIES_PER_READ:
                return


def num_marks_kept(recent_versions: int) -> int:
    """How many of the newest marks decide what is recent; the log keeps as many."""
    return max(2, 4 * recent_versions)
