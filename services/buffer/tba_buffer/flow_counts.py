"""Reads the counts that flow control decides by."""

from __future__ import annotations

from tba_buffer.context import Context
from tba_buffer.flow import FlowCounts
from tba_buffer.index import Index
from tba_buffer.redis_link import redis_errors
from tba_buffer.sampler import drawable_prompts


async def read_flow_counts(context: Context, index: Index) -> FlowCounts:
    """Where the run stands, by the counters in Redis and a level index.

    Raises:
        UnavailableError: Redis did not answer.
    """
    counters = await context.counters()
    with redis_errors("count the batches since the mark"):
        batches_since_mark = int(await context.redis.scard(context.keys.batches_since_mark))
    inserted = counters.get("scored_total", 0)
    return FlowCounts(
        stored=index.num_scored,
        can_fill_slot=len(drawable_prompts(index.counts)) > 0,
        inserted=inserted,
        leased=max(0, counters.get("inflight", 0)),
        drawn=counters.get("drawn", 0) - counters.get("void", 0),
        inserted_since_mark=inserted - counters.get("scored_at_mark", 0),
        batches_since_mark=batches_since_mark,
    )
