"""The ledger: an append-only list of two kinds of lines, in the order in which they happened.

    batch    step (lineage, step) consumed this batch (written by ack.lua)
    resume   a trainer started: its new lineage, and the version that it goes on from (written by lineage.lua)

Lines are never changed. What a resume abandoned follows from the lineages' parents: batch lines outside the living
lineage's history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tba.api import AckRequest, LedgerEntry, LedgerLine, LedgerReply, ResumeEntry
from tba_buffer.batch_record import BatchRecord
from tba_buffer.context import Context
from tba_buffer.lineage import Lineages
from tba_buffer.redis_link import redis_errors

MAX_ENTRIES_PER_PAGE = 10_000


def batch_line(record: BatchRecord, request: AckRequest, *, acked_at_s: float) -> dict[str, Any]:
    """The line of an acked batch: a LedgerEntry without `abandoned`."""
    return {
        "kind": "batch",
        "lineage": record.lineage,
        "step": record.step,
        "batch_id": record.batch_id,
        "acked_at_s": acked_at_s,
        "seed": record.seed,
        "log_position": record.log_position,
        "slots": record.slots(),
        "num_rollouts": record.num_rollouts,
        "rollout_ids": [rollout_id.hex() for rollout_id in record.rollout_ids],
        "most_on_policy_prob": record.most_on_policy_prob,
        "settings_revision": request.settings_revision,
        "metrics": request.metrics,
        "skipped": request.skipped,
        "refused": request.refused,
    }


async def read_ledger(context: Context, lineages: Lineages, *, after: int, limit: int) -> LedgerReply:
    """Lines from position `after` on. Abandoned is computed, never written.

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
    living = lineages.living(context.whole("lineage", lineage))
    entries: list[LedgerLine] = []
    for number, line in enumerate(lines, after):
        entry = context.read_or_note("ledger", f"line {number}", lambda line=line: _entry(line, living))
        if entry is not None:
            entries.append(entry)
    end = after + len(lines)
    return LedgerReply(entries=entries, next=end if lines and end < num_lines else None)


def _entry(line: bytes, living: Mapping[int, int]) -> LedgerLine:
    fields = json.loads(line)
    if fields.get("kind") == "resume":
        return ResumeEntry(**fields)
    return LedgerEntry(**fields, abandoned=fields["step"] > living.get(fields["lineage"], -1))
