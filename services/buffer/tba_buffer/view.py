"""Keeps the index level with the log, and rebuilds it from base and tail when the log is not what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tba.errors import SupersededError, UnavailableError
from tba.logs import get_logger
from tba_buffer.base import read_base, read_head
from tba_buffer.coalesce import Coalesced
from tba_buffer.context import Context
from tba_buffer.index import Index, IndexSettings
from tba_buffer.log import Base, Event, LogGapError, RolloutsAdded, parse_entries
from tba_buffer.redis_link import redis_errors

ENTRIES_PER_READ = 1000
NUM_BUILDS = 5
Entry = tuple[bytes, dict[bytes, bytes]]
log = get_logger("view")


class NotWholeError(UnavailableError):
    """What Redis has is not a whole log: nothing that is tried again makes it one."""


@dataclass(slots=True)
class _Levelled:
    """An index and the last entry that is in it: the log still has that one, unless Redis lost what it had.

    None when the index is fresh, empty, or ends where the log does not begin yet, as one from a base can. The two move
    together, also when what comes next cannot be read.
    """

    index: Index
    last: Entry | None = None


class IndexView:
    """The index of this run; `level` reads what the log has gained since.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = IndexSettings.of(context.recipe)
        self._lock = asyncio.Lock()
        self._reading = Coalesced(self._read, self._lock)
        self._levelled = _Levelled(Index(self._settings))
        self.on_rebuilt: Callable[[], Awaitable[None]] | None = None
        """Run when the log is not what it was, before the new index is used: Redis has lost more than the log then."""
        self.problem: str | None = None
        """Why there is no index of what Redis has now."""

    @property
    def index(self) -> Index:
        """The index as it was levelled last."""
        return self._levelled.index

    async def level(self) -> Index:
        """The index, with every push in it that was acknowledged before the call.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer.
            NotWholeError: what it has is not a whole log.
        """
        if self._context.replica.refused is not None:
            raise SupersededError(self._context.replica.refused)
        await self._reading.run()
        index, now_s = self.index, self._context.clock()
        while index.unusable:
            why = "its reward in the log is no number that may be, so it is failed"
            self._context.unreadable.note("rollout", index.unusable.pop().hex(), why, at_s=now_s)
        return index

    async def verify(self) -> str | None:
        """Read everything anew and compare it with what was read before, after a restart of Redis.

        Its file may have been damaged far from its end. Whoever calls lets nothing be acknowledged meanwhile.

        Returns:
            What is wrong; None when all is as it was.

        Raises:
            UnavailableError: Redis did not answer.
        """
        async with self._lock:
            if not self.index.position:
                return None
            try:
                if await self._is_as_read():
                    return None
                self._another("")
            except LogGapError as error:
                self._another(f" ({error})")
            except NotWholeError:
                pass
            return self.problem

    def _another(self, detail: str) -> None:
        self._refusal(
            f"the log of run {self._context.run!r} in Redis is another one than was acknowledged{detail}",
            ", or go on with it as it is (`tba buffer accept-loss`)",
        )

    async def reread(self) -> None:
        """Take what Redis has now, whatever was read before.

        Raises:
            UnavailableError: Redis did not answer.
            NotWholeError: what it has is not a whole log.
        """
        async with self._lock:
            await self._rebuild(is_first=False)

    async def _is_as_read(self) -> bool:
        """Whether base and tail still make the index that there is."""
        anew = await self._build()
        for _ in range(NUM_BUILDS):  # what was under way to Redis before may still be carried out
            await self._read_tail(self._levelled)
            await self._read_tail(anew)
            if anew.index.position == self.index.position:
                return _same(anew.index.base(), self.index.base())
        raise UnavailableError("the log goes on while it is compared; try again")

    async def _read(self) -> None:
        if self.index.position:
            try:
                await self._read_tail(self._levelled)
                self.problem = None
                return
            except LogGapError as error:
                log.warning("index_rebuilt", reason=str(error))
        await self._rebuild(is_first=not self.index.position)

    async def _rebuild(self, *, is_first: bool) -> None:
        levelled = await self._build()
        if not is_first and self.on_rebuilt is not None:
            await self.on_rebuilt()
        await self._check_prompts(levelled.index)
        self._levelled, self.problem = levelled, None

    async def _check_prompts(self, index: Index) -> None:
        """Prompts are uploaded before their rollouts: a log that names more of them is not of these prompts."""
        with redis_errors("count the prompts"):
            num_prompts = await self._context.redis.llen(self._context.keys.prompt_order)
        if len(index.counts) > num_prompts:
            raise self._refusal(
                f"Redis has lost prompts of run {self._context.run!r}: its log has rollouts of prompt number "
                f"{len(index.counts) - 1}, but it has {num_prompts} prompts, numbered from 0"
            )

    def _refusal(self, problem: str, more: str = "") -> NotWholeError:
        self.problem = (
            f"{problem}; restore Redis from a copy, or load a saved buffer into a new run (`tba buffer load`){more}"
        )
        return NotWholeError(self.problem)

    async def _build(self) -> _Levelled:
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
            levelled = _Levelled(index)
            try:
                await self._read_tail(levelled)
            except LogGapError as error:
                problem = str(error)
                continue
            if index.position >= end:
                return levelled
            problem = f"the entries end at {index.position}, but {end} was given out"
        raise self._refusal(f"the log of run {self._context.run!r} in Redis is not whole ({problem})")

    async def _log_end(self) -> int:
        with redis_errors("read the log position"):
            raw = await self._context.redis.hget(self._context.keys.counters, "log_position")
        return self._context.read_or_note("counter", "log_position", lambda: int(raw or 0)) or 0  # loss.py refuses then

    async def _read_tail(self, levelled: _Levelled) -> None:
        """Apply what comes after the index, page by page.

        Raises:
            LogGapError: the log does not continue where the index ends.
            UnavailableError: Redis did not answer; the pages before are applied, and the next call goes on from there.
        """
        index = levelled.index
        while True:
            position = index.position
            with redis_errors("read the log"):
                entries: list[Entry] = await self._context.redis.xrange(
                    self._context.keys.log, f"{position}-0", "+", ENTRIES_PER_READ
                )
            num_read = len(entries)
            if levelled.last is not None and entries[:1] != [levelled.last]:
                raise LogGapError(f"the log has another entry at {position} than was read there, or none")
            if entries and entries[0][0] == b"%d-0" % position:
                levelled.last = entries.pop(0)
            events = parse_entries(entries)
            if events:
                if not position and first_position(events[0]) != 1:
                    raise LogGapError(f"the log begins at {first_position(events[0])} and there is no base")
                index.apply_many(events)
                levelled.last = entries[-1]
            if num_read < ENTRIES_PER_READ:
                return


def _same(one: Base, other: Base) -> bool:
    return one.marks == other.marks and one.records.tobytes() == other.records.tobytes()


def first_position(event: Event) -> int:
    """The first position that an event takes."""
    return event.first_position if isinstance(event, RolloutsAdded) else event.position
