"""Every script is safe to repeat with the same arguments, as redis-py repeats it when a connection turns out dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tba_buffer.buffer import Buffer
from tba_buffer.scripts import NAMES, Scripts

from tba.api import (
    AckRequest,
    BatchRequest,
    CheckpointRequest,
    EvalRequest,
    EvalResult,
    EvalResults,
    LeaseRenewal,
    LeaseRequest,
    LeaseReturn,
    LineageRequest,
    MarkRequest,
    RunCommand,
)
from tba.wire import decode_batch, encode_rollout
from tests.support.buffer import make_prompts, make_recipe, make_rollout
from tests.support.buffer_fixtures import redis  # noqa: F401
from tests.support.redis_process import RedisProcess

REPLY_DIFFERS = {"push", "upload"}
"""They report what is new; the second time nothing is."""


@pytest.fixture
async def buffer(redis: RedisProcess) -> AsyncIterator[Buffer]:  # noqa: F811
    recipe = make_recipe(buffer={"redis_url": redis.url, "max_rollouts": 40})
    started = Buffer(recipe, CollectorRegistry())
    await started.context.redis.flushall()
    await started.start()
    yield started
    await started.stop()


async def everything(client: Any) -> dict[bytes, Any]:
    """All keys; without what a push counts of its duplicates."""
    readers = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"set": client.smembers,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": lambda key: client.xrange(key),
    }
    found = {key: await readers[await client.type(key)](key) for key in sorted(await client.keys("*"))}
    found.get(b"tba:test:counters", {}).pop(b"pushed:duplicate", None)
    return found


class TwiceScripts(Scripts):
    """Runs every script twice and compares."""

    def __init__(self, redis: Any) -> None:  # noqa: F811
        super().__init__(redis)
        self._redis = redis
        self.names: set[str] = set()

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        reply = await super().run(name, keys, args)
        before = await everything(self._redis)
        again = await super().run(name, keys, args)
        assert await everything(self._redis) == before, f"{name} is not safe to repeat"
        assert name in REPLY_DIFFERS or again == reply, f"{name} answers something else when it is repeated"
        self.names.add(name)
        return reply


async def test_every_script_run_twice_leaves_what_it_left_once(buffer: Buffer) -> None:
    twice = TwiceScripts(buffer.context.redis)
    object.__setattr__(buffer.context, "scripts", twice)
    lineages, leases, batches = buffer.lineages, buffer.leases, buffer.batches

    await buffer.catalog.upload(make_prompts(8, 3))
    lineage = await lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await lineages.mark(MarkRequest(version="0-0", token=lineage.token))
    evaluation = EvalRequest(
        version="0-0", token=lineage.token, num_prompts=1, num_samples=1, success_reward=1.0, timeout_s=60
    )
    eval_id = (await buffer.evals.request(evaluation)).eval_id
    reply = await leases.lease(LeaseRequest(searcher_id="s", max_leases=6))
    assert [lease.kind for lease in reply.leases] == ["sample", "greedy", *["train"] * 4]
    ids = [lease.lease_id for lease in reply.leases]
    await leases.renew(LeaseRenewal(searcher_id="s", lease_ids=ids))
    results = [EvalResult(lease_id=lease_id, rewards=[1.0], num_response_tokens=[3]) for lease_id in ids[:2]]
    await buffer.evals.results(eval_id, EvalResults(searcher_id="s", version="0-0", results=results))
    back = LeaseReturn(searcher_id="s", lease_ids=ids[2:3], refused_lease_ids=ids[3:4])
    await leases.give_back(back)
    again = await leases.lease(LeaseRequest(searcher_id="s", max_leases=2))
    assert again.leases[0].visit_id == reply.leases[2].visit_id

    visits = {lease.prompt.prompt_id: lease.visit_id for lease in reply.leases[4:]}
    for prompt_id, visit_id in [*visits.items(), *((f"train-{i}", "visit-of-nobody") for i in range(8))]:
        rollouts = [make_rollout(prompt_id, visit_id=visit_id, reward=float(i)) for i in range(4)]
        await buffer.rollouts.push([encode_rollout(rollout) for rollout in rollouts])
    assert (await buffer.stats()).evicted == {}
    await buffer.rollouts.push([encode_rollout(make_rollout()) for _ in range(8)])
    assert (await buffer.stats()).evicted == {"max_rollouts": 8}

    request = BatchRequest(trainer_id="t", lineage=lineage.lineage, step=1, token=lineage.token)
    batch = decode_batch((await batches.draw(request)).body)
    await batches.ack(batch.batch_id, AckRequest(lineage=1, step=1, token=lineage.token, policy_ages=[0] * 16))
    await batches.draw(request.model_copy(update={"step": 2}))
    await lineages.checkpoint(CheckpointRequest(version="1-1", token=lineage.token, key="checkpoints/1-1"))
    await lineages.new(LineageRequest(trainer_id="t", parent="1-1"))
    await buffer.run.command("pause", RunCommand(reason="look"))
    assert twice.names == set(NAMES)


async def test_a_lease_script_that_is_repeated_answers_the_leases_that_it_granted(buffer: Buffer) -> None:
    await buffer.catalog.upload(make_prompts(8, 3))
    lineage = await buffer.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await buffer.lineages.mark(MarkRequest(version="0-0", token=lineage.token))
    calls: list[Any] = []

    class LostReply(Scripts):
        async def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
            if name == "lease":
                calls.append(await super().run(name, keys, args))
            return await super().run(name, keys, args)

    object.__setattr__(buffer.context, "scripts", LostReply(buffer.context.redis))
    leases = (await buffer.leases.lease(LeaseRequest(searcher_id="s", max_leases=3))).leases
    assert len(leases) == 3
    assert [lease.lease_id.encode() for lease in leases] == calls[0][2::5]
    counters = await buffer.context.counters()
    assert (counters["inflight"], counters["leases:granted"]) == (12, 3)
    assert (await buffer.stats()).leases["open"] == 3


async def test_uploads_at_once_add_every_prompt_once(buffer: Buffer) -> None:
    prompts = make_prompts(3000)
    await asyncio.gather(*(buffer.catalog.upload(prompts[at : at + 500]) for at in range(0, 3000, 500)))
    assert sorted(buffer.catalog.ids) == sorted(prompt.prompt_id for prompt in prompts)
    assert len(buffer.catalog.train) == 3000
    numbers = [buffer.catalog.find(prompt_id) for prompt_id in buffer.catalog.ids]
    assert [found[0] for found in numbers if found] == list(range(3000))
