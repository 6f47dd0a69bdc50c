"""Clients and clocks that misbehave: half a body, thousands of equal pushes at once, a clock that jumps."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry
from tba_buffer.service import Buffer

from tba.api import AckRequest, BatchRequest, LeaseRequest, LineageRequest, VersionRequest
from tba.errors import ServiceError, VoidBatchError
from tba.wire import decode_batch
from tests.support.buffer import Stack, make_payloads, make_prompts, make_recipe
from tests.support.redis_process import RedisProcess, start_redis

Counts = list[Counter[str]]
Start = Callable[..., Stack]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = start_redis(tmp_path_factory.mktemp("redis"))
    yield process
    process.stop()


def test_a_clock_that_jumps(redis: RedisProcess, seed: int, count: Counts) -> None:
    """Leases and batches may end early or late; rollouts, ledger and counts stay right."""
    count.append(asyncio.run(_jumping(redis, random.Random(seed))))


async def _jumping(redis: RedisProcess, rng: random.Random) -> Counter[str]:
    counts: Counter[str] = Counter()
    offset_s = [0.0]
    recipe = make_recipe(buffer={"redis_url": redis.url, "batch_deadline_s": 30, "lease_s": 20, "port": 0})
    buffer = Buffer(recipe, CollectorRegistry(), clock=lambda: time.time() + offset_s[0])
    await buffer.context.redis.flushall()
    await buffer.start()
    try:
        await buffer.catalog.upload(make_prompts(6))
        lineage = await buffer.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
        await buffer.lineages.publish(VersionRequest(version="0-0", token=lineage.token))
        step, num_pushed = 1, 0
        for _ in range(60):
            offset_s[0] += rng.choice([0, 0, 3, 25, 100, 86_400 * 365, -25, -100, -86_400 * 365])
            payloads = make_payloads([f"train-{rng.randrange(6)}"], per_prompt=4)
            num_pushed += len(payloads)
            await buffer.writer.push(payloads)
            await buffer.leases.lease(LeaseRequest(searcher_id="s", max_leases=2))
            request = BatchRequest(trainer_id="t", lineage=lineage.lineage, step=step, token=lineage.token)
            try:
                batch = decode_batch((await buffer.drawer.draw(request)).body)
                offset_s[0] += rng.choice([0, 0, 0, 100, -100])
                ack = AckRequest(lineage=lineage.lineage, step=step, token=lineage.token)
                await buffer.ledger.ack(batch.batch_id, ack)
                step += 1
                counts["acked_steps"] += 1
            except VoidBatchError:
                counts["void"] += 1
            except ServiceError as error:
                counts[error.slug] += 1
        stats = await buffer.stats.read()
        assert stats.num_rollouts == num_pushed
        assert stats.rollouts_trained == 16 * (step - 1)
        assert counts["acked_steps"] > 0
        assert stats.leases["open"] <= stats.leases["granted"]
        assert min(stats.leases.values()) >= 0
    finally:
        await buffer.stop()
    return counts
