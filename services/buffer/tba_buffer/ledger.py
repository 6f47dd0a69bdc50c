"""The ledger: one line per acked batch, in order. Lines outside the living lineage's history are abandoned."""

from __future__ import annotations

import json

from tba.api import LedgerEntry, LedgerReply
from tba_buffer.context import Context
from tba_buffer.lineage import Lineages
from tba_buffer.redis_link import redis_errors

MAX_ENTRIES_PER_PAGE = 10_000


async def read_ledger(context: Context, lineages: Lineages, *, after: int, limit: int) -> LedgerReply:
    """Lines from position `after` on. Abandoned is computed, never written: it follows from the lineages' parents.

    Raises:
        UnavailableError: Redis did not answer.
    """
    limit = min(limit, MAX_ENTRIES_PER_PAGE)
    with redis_errors("read the ledger"):
        async with context.redis.pipeline(transaction=True) as pipe:
            pipe.lrange(context.keys.ledger, after, after + limit - 1)
            pipe.llen(context.keys.ledger)
            pipe.hget(context.keys.run, "lineage")
            lines, num_lines, lineage = await pipe.execute()
    living = lineages.living(int(lineage or 0))
    entries = []
    for line in lines:
        fields = json.loads(line)
        abandoned = fields["step"] > living.get(fields["lineage"], -1)
        entries.append(LedgerEntry(**fields, abandoned=abandoned))
    end = after + len(entries)
    return LedgerReply(entries=entries, next=end if entries and end < num_lines else None)
