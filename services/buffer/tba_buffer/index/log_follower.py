"""Keep the index equal to the log in Redis, and the log short.

replay      IndexView reads the events after the position of its index. If the log differs from what was read before,
            it rebuilds the index from checkpoint and events.
compaction  Compactor writes all live rollouts as a checkpoint, so that older log entries can be deleted:
            1. write pieces (first the draws, PIECE_BYTES each; then records, PIECE_RECORDS each) under new keys,
               which expire by themselves
            2. compact.lua, one atomic step: make the pieces permanent, name them in `base`, trim the log, and delete
               the pieces of the checkpoint before
            A crash between the two leaves pieces that `base` does not name. They expire.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from tba.concurrency import SingleFlight
from tba.errors import MalformedError, SupersededError, UnavailableError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_buffer.index.log import (
    CHECKPOINT_DTYPE,
    LogCheckpoint,
    LogGapError,
    Publication,
    first_position,
    parse_entries,
)
from tba_buffer.index.rollout_index import Index, IndexSettings
from tba_buffer.storage.context import DAMAGE_ERRORS, Context
from tba_buffer.storage.redis_client import read_count, redis_errors

ENTRIES_PER_READ = 1000
NUM_BUILDS = 5
PIECE_RECORDS = 65_536
PIECE_BYTES = 4 << 20
MIN_EVENTS = 200_000
PIECE_LIFETIME_MS = 600_000
RETRY_S = 120.0
Entry = tuple[bytes, dict[bytes, bytes]]
log = get_logger("index")


class IncompleteLogError(UnavailableError):
    """A part of the log is missing in Redis. Trying again does not help."""


@dataclass(slots=True)
class _Replayed:
    """An index and the last log entry in it. The log still has that entry, unless Redis lost data.

    `last` is None when the index is empty. It is also None when the index was restored from a checkpoint and ends
    before the first entry of the log. The two fields change together, also when a later entry cannot be read.
    """

    index: Index
    last: Entry | None = None


class IndexView:
    """The index of this run; `catch_up` applies the log entries that are new in Redis."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = IndexSettings.of(context.recipe)
        self._lock = asyncio.Lock()
        self._reading = SingleFlight(self._read, self._lock)
        self._replayed = _Replayed(Index(self._settings))
        self.on_rebuilt: Callable[[], Awaitable[None]] | None = None
        """Awaited before a rebuilt index is used, because Redis may have lost more than log entries."""
        self.problem: str | None = None
        """Why no index can be built from the log in Redis, or None."""

    @property
    def index(self) -> Index:
        """The index as of the last `catch_up`."""
        return self._replayed.index

    async def catch_up(self) -> Index:
        """Read the new log entries and return the index. It has every push that was acknowledged before the call.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or answered with an error.
            IncompleteLogError: a part of the log is missing.
        """
        # no read can tell it: the log of the newer process continues this one
        if self._context.epoch.refused is not None:
            raise SupersededError(self._context.epoch.refused)
        await self._reading.run()
        index = self.index
        while index.unusable:
            why = "its reward in the log is not an allowed number, so the rollout counts as failed"
            log.warning("damaged_rollout", rollout_id=index.unusable.pop().hex(), reason=why)
        return index

    async def verify(self) -> str | None:
        """Build a second index from Redis, after Redis restarted, and compare it with the one in memory.

        The file of Redis may be damaged far from its end. The caller lets nothing be acknowledged meanwhile.

        Returns:
            A sentence about the difference or the missing part of the log; None when both are equal.
        """
        async with self._lock:
            # nothing was read before the restart, so there is nothing to compare
            if not self.index.position:
                return None
            try:
                again = await self._build()
                # a write that was on its way to Redis before may still arrive, in the middle of the comparison
                for _ in range(NUM_BUILDS):
                    await self._read_newer(self._replayed)
                    await self._read_newer(again)
                    if again.index.position == self.index.position:
                        break
                else:
                    raise UnavailableError("the log grows while it is compared; try again")
                one, other = again.index.checkpoint(), self.index.checkpoint()
                records = one.records.tobytes() == other.records.tobytes()
                if records and (one.publications, one.draws) == (other.publications, other.draws):
                    return None
                detail = ""
            except LogGapError as error:
                detail = f" ({error})"
            except IncompleteLogError:
                return self.problem  # `_refusal` has set it
            self._refusal(
                f"the log of run {self._context.run!r} in Redis is not the one that was acknowledged{detail}",
                ", or continue with it as it is (`tba buffer accept-loss`)",
            )
            return self.problem

    async def reread(self) -> None:
        """Rebuild the index from Redis, whatever was read before.

        Raises:
            UnavailableError: Redis did not answer, or answered with an error.
            IncompleteLogError: a part of the log is missing.
        """
        async with self._lock:
            await self._rebuild(is_first=False)

    async def _read(self) -> None:
        if self.index.position:
            try:
                await self._read_newer(self._replayed)
                self.problem = None
                return
            except LogGapError as error:
                # Redis came back without entries that were read here, or with others in their place
                log.warning("index_rebuilt", reason=str(error))
        await self._rebuild(is_first=not self.index.position)

    async def _rebuild(self, *, is_first: bool) -> None:
        replayed = await self._build()
        if not is_first and self.on_rebuilt is not None:
            await self.on_rebuilt()
        # prompts are uploaded before their rollouts, so a log that names more of them belongs to other prompts
        with redis_errors("count the prompts"):
            num_prompts = await self._context.redis.llen(self._context.keys.prompt_order)
        if (num_named := len(replayed.index.counts)) > num_prompts:
            raise self._refusal(
                f"Redis has lost prompts of run {self._context.run!r}: its log has rollouts of prompt number "
                f"{num_named - 1}, but it has {num_prompts} prompts, numbered from 0"
            )
        self._replayed, self.problem = replayed, None

    async def _build(self) -> _Replayed:
        """Build a new index from checkpoint and events."""
        problem = ""
        # another checkpoint may replace this one while it is read: then all begins again
        for _ in range(NUM_BUILDS):
            index, head = Index(self._settings), await read_head(self._context)
            with redis_errors("read the log position"):
                raw = await self._context.redis.hget(self._context.keys.counters, "log_position")
            # a damaged number counts as none here: the durability check refuses the run for it (lost_changes.py)
            end = read_count(raw) or 0
            if head.generation:
                checkpoint = await read_checkpoint(self._context, head)
                if checkpoint is None:
                    problem = f"pieces of checkpoint {head.generation} are missing"
                    continue
                try:
                    index.restore(checkpoint)
                except (ValueError, MalformedError) as error:
                    raise _damaged(self._context.keys.log_checkpoint, error) from None
            replayed = _Replayed(index)
            try:
                await self._read_newer(replayed)
            except LogGapError as error:
                problem = str(error)
                continue
            # entries at the end may be missing too, which only the counter of positions shows
            if index.position >= end:
                return replayed
            problem = f"the entries end at {index.position}, but position {end} was assigned"
        raise self._refusal(f"the log of run {self._context.run!r} in Redis is not whole ({problem})")

    async def _read_newer(self, replayed: _Replayed) -> None:
        """Apply the log entries after the index's position, page by page.

        Raises:
            LogGapError: the log does not continue where the index ends.
            UnavailableError: Redis did not answer; earlier pages are applied, and the next call continues there.
        """
        index = replayed.index
        while True:
            position = index.position
            with redis_errors("read the log"):
                entries: list[Entry] = await self._context.redis.xrange(
                    self._context.keys.log, f"{position}-0", "+", ENTRIES_PER_READ
                )
            num_read = len(entries)
            # the page begins with the entry that was read last: only so a log that was exchanged is noticed
            if replayed.last is not None and entries[:1] != [replayed.last]:
                raise LogGapError(f"the log has no entry at {position}, or another entry than the one that was read")
            if entries and entries[0][0] == b"%d-0" % position:
                replayed.last = entries.pop(0)
            events = parse_entries(entries)
            if events:
                if not position and first_position(events[0]) != 1:
                    raise LogGapError(f"the log begins at {first_position(events[0])} and there is no checkpoint")
                index.apply_many(events)
                replayed.last = entries[-1]
            if num_read < ENTRIES_PER_READ:
                return

    def _refusal(self, problem: str, more: str = "") -> IncompleteLogError:
        self.problem = (
            f"{problem}; restore Redis from a copy, or load a saved buffer into a new run (`tba buffer load`){more}"
        )
        return IncompleteLogError(self.problem)


class Compactor:
    """Replaces old log entries by a checkpoint when the log has become long.

    Args:
        context: Redis and settings.
        min_events: a checkpoint is due when the log has more positions than the larger of `min_events` and half the
            number of live rollouts. It is also due when the log has more entries than a quarter of that maximum.
        piece_records: records per piece.
    """

    def __init__(self, context: Context, *, min_events: int = MIN_EVENTS, piece_records: int = PIECE_RECORDS) -> None:
        self._context = context
        self._min_tail = min_events
        self._piece_records = piece_records
        self._retry_at_s = 0.0

    async def keep_up(self, index: Index) -> None:
        """Write a checkpoint if one is due; after a failure the next attempt waits RETRY_S.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or did not store everything.
        """
        now, head = asyncio.get_running_loop().time(), await read_head(self._context)
        with redis_errors("measure the log"):
            num_entries = await self._context.redis.xlen(self._context.keys.log)
        positions_due = index.position - head.position > max(self._min_tail, index.num_live // 2)
        entries_due = num_entries > max(self._min_tail // 4, index.num_live // 8)
        # after a failure not at once: a checkpoint writes everything that is live
        if (positions_due or entries_due) and now >= self._retry_at_s:
            self._retry_at_s = now + RETRY_S
            if await self._write(index, head):
                self._retry_at_s = 0.0

    async def _write(self, index: Index, before: CheckpointHead) -> bool:
        context, keys = self._context, self._context.keys
        # turns and uses are counted, so they must be those at this very position
        position, draws = index.position, index.pack_draws()
        publications = [[each.position, each.version.lineage, each.version.step] for each in index.publications]
        with redis_errors("number a checkpoint of the log"):
            generation = int(await context.redis.hincrby(keys.log_checkpoint, "attempts", 1))
        num_pieces, num_bytes, after = 0, 0, 0

        async def write(piece: bytes) -> None:
            nonlocal num_pieces, num_bytes
            with redis_errors("write a piece of the checkpoint"):
                await context.redis.set(keys.checkpoint_piece(generation, num_pieces), piece, px=PIECE_LIFETIME_MS)
            num_pieces, num_bytes = num_pieces + 1, num_bytes + len(piece)

        for at in range(0, len(draws), PIECE_BYTES):
            await write(draws[at : at + PIECE_BYTES])
        num_draw_pieces = num_pieces
        # The index changes between two pieces: rollouts that are gone are missing in later pieces, and scored ones have
        # their new reward. Replaying the log from `position` on ends in the same index all the same.
        while True:
            rows = index.columns.live(index.columns.row_after(after), num=self._piece_records)
            records = index.records(rows[index.column("position", rows) <= position])
            if not len(records):
                break
            after = int(records["position"][-1])
            await write(records.tobytes())
        reply = await context.scripts.run(
            "compact",
            generation=generation,
            position=position,
            num_pieces=num_pieces,
            num_draw_pieces=num_draw_pieces,
            num_bytes=num_bytes,
            publications=json.dumps(publications),
            generation_before=before.generation,
            num_pieces_before=before.num_pieces,
        )
        if reply != b"ok":
            log.warning("log_checkpoint_not_used", generation=generation, reply=reply.decode())
            return False
        log.info("log_compacted", generation=generation, position=position, num_bytes=num_bytes)
        return True


@dataclass(frozen=True, slots=True)
class CheckpointHead:
    """Describes the current checkpoint of the log in Redis, without its pieces. Generation 0: there is none yet."""

    generation: int
    position: int
    num_pieces: int
    num_draw_pieces: int
    """How many of the first pieces hold draws; the others hold records."""
    publications: tuple[Publication, ...]


async def read_head(context: Context) -> CheckpointHead:
    """Read the head of the log's current checkpoint from Redis.

    Raises:
        UnavailableError: Redis did not answer, or the head is damaged.
    """
    with redis_errors("read the checkpoint of the log"):
        raw = await context.redis.hgetall(context.keys.log_checkpoint)
    if b"generation" not in raw:
        return CheckpointHead(generation=0, position=0, num_pieces=0, num_draw_pieces=0, publications=())
    try:
        marks = json.loads(raw[b"marks"])
        return CheckpointHead(
            generation=int(raw[b"generation"]),
            position=int(raw[b"position"]),
            num_pieces=int(raw[b"num_pieces"]),
            num_draw_pieces=int(raw[b"num_draw_pieces"]),
            publications=tuple(Publication(at, PolicyVersion(lineage, step)) for at, lineage, step in marks),
        )
    except DAMAGE_ERRORS as error:
        raise _damaged(context.keys.log_checkpoint, error) from None


async def read_checkpoint(context: Context, head: CheckpointHead) -> LogCheckpoint | None:
    """Read the checkpoint that `head` describes; None when its pieces are gone, because another has replaced it.

    Raises:
        UnavailableError: Redis did not answer, or a piece is damaged.
    """
    pieces, draws = [], []
    for number in range(head.num_pieces):
        with redis_errors("read a piece of the checkpoint"):
            piece = await context.redis.get(context.keys.checkpoint_piece(head.generation, number))
        if piece is None:
            return None
        if number < head.num_draw_pieces:
            draws.append(piece)
            continue
        try:
            pieces.append(np.frombuffer(piece, dtype=CHECKPOINT_DTYPE))
        except ValueError as error:
            raise _damaged(context.keys.checkpoint_piece(head.generation, number), error) from None
    records = np.concatenate(pieces) if pieces else np.zeros(0, dtype=CHECKPOINT_DTYPE)
    return LogCheckpoint(head.position, head.publications, records, b"".join(draws))


def _damaged(key: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"{key}, the checkpoint of the log, cannot be read ({type(error).__name__}: {error}); restore Redis from a "
        "copy, or load a saved buffer into a new run (`tba buffer load`)"
    )
