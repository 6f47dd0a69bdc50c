"""GET /v1/stats: counts of the whole run, from the counters in Redis and the index."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tba.api import Stats
from tba_buffer.context import Context
from tba_buffer.prompts import Catalog
from tba_buffer.redis_link import redis_errors
from tba_buffer.view import IndexView

LEASE_EVENTS = ("granted", "fulfilled", "expired", "returned", "refused")


async def read_stats(context: Context, catalog: Catalog, view: IndexView) -> Stats:
    """All counts.

    `samples_per_insert` is trained per generated rollout; `realised_most_on_policy` is the share of slots that drew
    from recent data; `num_prompts_seen` counts prompts with a scored rollout stored now.

    Raises:
        UnavailableError: Redis did not answer.
    """
    index = await view.level()
    counters = await context.counters()
    with redis_errors("read the counters"):
        async with context.redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(context.keys.ages)
            pipe.hlen(context.keys.leases)
            ages, num_leases = await pipe.execute()
    sampling = context.recipe.sampling
    recent_rows, _ = index.recent_rows(sampling.recent_window, sampling.recent_versions)
    slots, generated, trained = _group(counters, "slots"), counters.get("generated", 0), counters.get("trained", 0)
    leases = _group(counters, "leases")
    return Stats(
        run=context.run,
        num_rollouts=counters.get("live", 0),
        num_scored=counters.get("scored", 0),
        num_pending=counters.get("pending", 0),
        num_failed=counters.get("failed", 0),
        num_prompts_train=len(catalog.train),
        num_prompts_heldout=len(catalog.heldout),
        num_prompts_seen=int(np.count_nonzero(index.counts)),
        payload_bytes=counters.get("payload_bytes", 0),
        log_position=counters.get("log_position", 0),
        num_marks=counters.get("marks", 0),
        pushed={name: counters.get(f"pushed:{name}", 0) for name in ("new", "duplicate", "refused")},
        refused=_group(counters, "refused"),
        evicted=_group(counters, "evicted"),
        leases={"open": num_leases, **{name: leases.get(name, 0) for name in LEASE_EVENTS}},
        rollouts_generated=generated,
        rollouts_drawn=counters.get("drawn", 0),
        rollouts_trained=trained,
        samples_per_insert=trained / generated if generated else None,
        slots=slots,
        realised_most_on_policy=slots["recent"] / slots["total"] if slots.get("total") else None,
        mean_reward_recent=float(index.rewards(recent_rows).mean()) if len(recent_rows) else None,
        policy_age_histogram=dict(sorted((int(age), int(num)) for age, num in ages.items())),
    )


def _group(counters: Mapping[str, int], group: str) -> dict[str, int]:
    prefix = group + ":"
    return {name.removeprefix(prefix): value for name, value in sorted(counters.items()) if name.startswith(prefix)}
