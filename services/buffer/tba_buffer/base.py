"""The base of the log: everything that was live at one position, so that the log need not be kept from the start.

    write     pieces of PIECE_RECORDS records under names that nobody has used before, which expire by themselves
              (the index goes on between two pieces: what is gone by then is left out of the later ones, and what was
              scored has its new reward; replaying the tail from the position of the base changes nothing of that)
    switch    base.lua: the pieces stay, `base` names them, the log is cut, the pieces of the base before go; one
              atomic step
A crash between the steps leaves pieces that nothing names; they expire.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.errors import UnavailableError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_buffer import replica
from tba_buffer.context import Context
from tba_buffer.index import Index
from tba_buffer.log import BASE_DTYPE, Base, Mark
from tba_buffer.redis_link import redis_errors
from tba_buffer.unreadable import DAMAGE

PIECE_RECORDS = 65_536
MIN_TAIL = 200_000
PIECE_LIFETIME_MS = 600_000
RETRY_S = 120.0
log = get_logger("base")


@dataclass(frozen=True, slots=True)
class BaseHead:
    """Which base Redis has. Generation 0: none."""

    generation: int
    position: int
    num_pieces: int
    marks: tuple[Mark, ...]


async def read_head(context: Context) -> BaseHead:
    """The head of the base.

    Raises:
        UnavailableError: Redis did not answer, or what it has is damaged.
    """
    with redis_errors("read the base"):
        raw = await context.redis.hgetall(context.keys.base)
    if b"generation" not in raw:
        return BaseHead(generation=0, position=0, num_pieces=0, marks=())
    try:
        return BaseHead(
            generation=int(raw[b"generation"]),
            position=int(raw[b"position"]),
            num_pieces=int(raw[b"num_pieces"]),
            marks=tuple(Mark(at, PolicyVersion(lineage, step)) for at, lineage, step in json.loads(raw[b"marks"])),
        )
    except DAMAGE as error:
        raise _damaged(context.keys.base, error) from None


async def read_base(context: Context, head: BaseHead) -> Base | None:
    """The base that `head` names; None when its pieces are gone, because another base has replaced it.

    Raises:
        UnavailableError: Redis did not answer, or what it has is damaged.
    """
    pieces = []
    for number in range(head.num_pieces):
        with redis_errors("read a piece of the base"):
            piece = await context.redis.get(context.keys.base_piece(head.generation, number))
        if piece is None:
            return None
        try:
            pieces.append(np.frombuffer(piece, dtype=BASE_DTYPE))
        except ValueError as error:
            raise _damaged(context.keys.base_piece(head.generation, number), error) from None
    records = np.concatenate(pieces) if pieces else np.zeros(0, dtype=BASE_DTYPE)
    return Base(position=head.position, marks=head.marks, records=records)


def _damaged(key: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"{key}, the base of the log, cannot be read ({type(error).__name__}: {error}); restore Redis from a copy, or "
        "load a saved buffer into a new run (`tba buffer load`)"
    )


class BaseWriter:
    """Writes a new base when the tail has become long.

    Args:
        context: Redis and settings.
        min_tail: a tail of at most so many positions and a quarter as many entries is never replaced. Above that, one
            of more positions than half, or more entries than an eighth, of what is live is.
        piece_records: records per piece.
    """

    def __init__(self, context: Context, *, min_tail: int = MIN_TAIL, piece_records: int = PIECE_RECORDS) -> None:
        self._context = context
        self._min_tail = min_tail
        self._piece_records = piece_records
        self._retry_at_s = 0.0

    async def keep_up(self, index: Index) -> None:
        """Write a base if one is due; after a failure the next attempt waits RETRY_S.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or did not take it all.
        """
        now, head = asyncio.get_running_loop().time(), await read_head(self._context)
        with redis_errors("measure the log"):
            num_entries = await self._context.redis.xlen(self._context.keys.log)
        positions_due = index.position - head.position > max(self._min_tail, index.num_live // 2)
        entries_due = num_entries > max(self._min_tail // 4, index.num_live // 8)
        if (positions_due or entries_due) and now >= self._retry_at_s:
            self._retry_at_s = now + RETRY_S
            if await self._write(index, head):
                self._retry_at_s = 0.0

    async def _write(self, index: Index, before: BaseHead) -> bool:
        context, keys = self._context, self._context.keys
        position, marks = index.position, [[m.position, m.version.lineage, m.version.step] for m in index.marks]
        with redis_errors("number a base"):
            generation = int(await context.redis.hincrby(keys.base, "attempts", 1))
        names: list[str] = []
        num_bytes, after = 0, 0
        while len(piece := _records(index, after, position, self._piece_records)):
            names.append(keys.base_piece(generation, len(names)))
            num_bytes, after = num_bytes + piece.nbytes, int(piece["position"][-1])
            with redis_errors("write a piece of the base"):
                await context.redis.set(names[-1], piece.tobytes(), px=PIECE_LIFETIME_MS)
        old_names = [keys.base_piece(before.generation, number) for number in range(before.num_pieces)]
        reply = await context.scripts.run(
            "base",
            [keys.base, keys.log, keys.replica, *names, *old_names],
            [
                context.replica.number,
                generation,
                position,
                len(names),
                num_bytes,
                json.dumps(marks),
                before.generation or "",
            ],
        )
        if reply == replica.SUPERSEDED:
            raise await replica.refusal(context, "the new base of the log")
        if reply != b"ok":
            log.warning("base_not_used", generation=generation, reply=reply.decode())
            return False
        log.info("base_written", generation=generation, position=position, num_bytes=num_bytes)
        return True


def _records(index: Index, after: int, until: int, num: int) -> NDArray[np.void]:
    """At most `num` records (BASE_DTYPE) of live rollouts with positions after `after`, up to `until`."""
    rows = index.table.live(index.table.row_after(after), num=num)
    rows = rows[index.column("position", rows) <= until]
    records = np.empty(len(rows), dtype=BASE_DTYPE)
    for name in BASE_DTYPE.names or ():
        records[name] = index.column(name, rows)
    return records
