"""Which steps trained a rollout: from the ack to GET /v1/rollouts/{rollout_id}, within bounds, over restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tba_buffer.rollouts.trained_steps import RECORDS_PER_READ, TrainedSteps, encode_trained
from tba_buffer.run.lineage import Lineages
from tba_buffer.storage.context import Context

from tba.api import AckRequest, LineageReply, RolloutDetail, TrainedRollouts
from tba.clients import BufferClient
from tba.errors import BadRequestError
from tba.versions import PolicyVersion
from tba.wire import Batch
from tests.support.buffer import make_recipe, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.leases import draw
from tests.support.redis_process import RedisProcess


def ids_of(batch: Batch) -> list[str]:
    return [rollout.rollout_id.hex() for rollout in batch.rollouts]


def trained_of(ids: Sequence[str], step: int) -> TrainedRollouts:
    """Row i of a step has A_j = step + i / 10 and weight 1 / (i + 1); the second row neither."""
    return TrainedRollouts(
        rollout_ids=list(ids),
        advantages=[None if i == 1 else step + i / 10 for i in range(len(ids))],
        weights=[None if i == 1 else float(f"{1 / (i + 1):.6g}") for i in range(len(ids))],
    )


def make_step(client: BufferClient, lineage: LineageReply, step: int, **fields: object) -> list[str]:
    """Draw and ack; return the ids of the batch. `fields` replace those of the ack."""
    batch = draw(client, lineage, step)
    document = {"trained": trained_of(ids_of(batch), step), **fields}
    request = AckRequest(lineage=lineage.lineage, step=step, token=lineage.token, **document)  # pyright: ignore
    client.ack(batch.batch_id, request)
    return ids_of(batch)


def versions(detail: RolloutDetail) -> list[str]:
    return [step.version for step in detail.trained]


def trained_steps(client: BufferClient) -> tuple[int, int]:
    found = client.stats().trained_steps
    return found["kept"], found["dropped"]


def test_a_rollout_says_what_each_step_made_of_it(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(4, per_prompt=4)
    batch = draw(client, lineage, 1)
    ids = ids_of(batch)
    before = client.get_rollout(ids[0])
    assert (before.trained, before.trained_since) == ([], None)
    request = AckRequest(lineage=1, step=1, token=lineage.token, trained=trained_of(ids, 1))
    for _ in range(3):  # a repeated one changes nothing
        client.ack(batch.batch_id, request)
    assert trained_steps(client) == (1, 0)
    for row, rollout_id in enumerate(ids):
        (step,) = client.get_rollout(rollout_id).trained
        expected = (None, None) if row == 1 else (1 + row / 10, float(f"{1 / (row + 1):.6g}"))
        assert (step.advantage, step.weight) == expected
        assert (step.version, step.skipped, step.abandoned) == ("1-1", None, False)
    ledger = client.ledger().entries
    assert client.get_rollout(ids[0]).trained[0].at_s == ledger[-1].acked_at_s  # pyright: ignore
    refused = make_step(client, lineage, 2, skipped="non_finite", trained=None)
    skipped = make_step(client, lineage, 3, skipped="loss_spike")
    assert set(refused) == set(skipped) == set(ids)  # a batch takes all 16 rollouts
    detail = client.get_rollout(ids[0])
    assert [(step.version, step.skipped) for step in detail.trained] == [("1-1", None), ("1-3", "loss_spike")]
    assert detail.trained_since == "1-1"


def test_refused_rollouts_are_not_reported(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(4, per_prompt=4)
    batch = draw(client, lineage, 1)
    ids = ids_of(batch)
    fields = {"lineage": 1, "step": 1, "token": lineage.token, "refused": {"too-long": 4}}
    with pytest.raises(BadRequestError, match=r"has 16 rollouts, 0 of which are not in the batch; .* 4 were refused"):
        client.ack(batch.batch_id, AckRequest(**fields, trained=trained_of(ids, 1)))  # pyright: ignore
    stranger = trained_of([*ids[:11], "0" * 32], 1)
    with pytest.raises(BadRequestError, match="has 12 rollouts, 1 of which are not in the batch"):
        client.ack(batch.batch_id, AckRequest(**fields, trained=stranger))  # pyright: ignore
    client.ack(batch.batch_id, AckRequest(**fields, trained=trained_of(ids[:12], 1)))  # pyright: ignore
    assert [versions(client.get_rollout(each)) for each in ids] == [["1-1"]] * 12 + [[]] * 4


def test_the_newest_steps_are_kept_and_the_others_counted(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer(buffer={"MAX_TRAINED_STEPS": 2}).begin(4, per_prompt=4)
    seen = []
    for step in range(1, 6):
        detail = client.get_rollout(make_step(client, lineage, step)[0])
        seen.append((versions(detail), detail.trained_since, trained_steps(client)))
    newest = [([f"1-{step - 1}", f"1-{step}"], f"1-{step - 1}", (2, step - 2)) for step in range(2, 6)]
    assert seen == [(["1-1"], "1-1", (1, 0)), *newest]


def test_acks_of_older_trainers_keep_none(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(4, per_prompt=4)
    ids = make_step(client, lineage, 1, trained=None)
    make_step(client, lineage, 2, trained=trained_of([], 2))
    detail = client.get_rollout(ids[0])
    assert (detail.trained, detail.trained_since, trained_steps(client)) == ([], None, (0, 0))


def test_a_restarted_buffer_still_knows_and_marks_what_a_resume_abandons(serve_buffer: ServeBuffer) -> None:
    first = serve_buffer()
    client, lineage = first.begin(4, per_prompt=4)
    ids, *_ = [make_step(client, lineage, step) for step in (1, 2, 3)]
    known = client.get_rollout(ids[5])
    assert versions(known) == ["1-1", "1-2", "1-3"]
    first.stop()
    client = serve_buffer().client()
    assert client.get_rollout(ids[5]).trained == known.trained
    resumed = start_lineage(client, PolicyVersion(1, 1))
    make_step(client, resumed, 2)
    steps = [(step.version, step.abandoned) for step in client.get_rollout(ids[5]).trained]
    assert steps == [("1-1", False), ("1-2", True), ("1-3", True), ("2-2", False)]


def record(rollout_ids: Sequence[bytes], step: int) -> bytes:
    ids, num = [each.hex() for each in rollout_ids], len(rollout_ids)
    trained = TrainedRollouts(rollout_ids=ids, advantages=[float(step)] * num, weights=[1.0] * num)
    return encode_trained(AckRequest(lineage=0, step=step, token="t", trained=trained), acked_at_s=float(step))


def test_what_is_read_in_pages_is_what_redis_has(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps are acked between all pages; ids that only look alike across a border are not found."""
    rng = random.Random(3)
    known = [rng.randbytes(16) for _ in range(20)]
    across = known[0][8:] + known[1][:8]
    steps = [[*rng.choices(known, k=5), known[0], known[1]] for _ in range(3 * RECORDS_PER_READ + 5)]

    async def compare() -> None:
        context = Context.connect(make_recipe(buffer={"redis_url": redis.url}))
        await context.redis.flushall()
        key, lrange, num_steps = context.keys.trained, context.redis.lrange, len(steps)
        reader = TrainedSteps(context, lineages := Lineages(context))
        await lineages.load()
        assert await reader.of(known[0]) == ([], None)
        await context.redis.rpush(key, *(record(ids, n) for n, ids in enumerate(steps, 1)))
        for each in rng.sample(known, 3):
            found, since = await reader.of(each)
            expected = [n for n, ids in enumerate(steps, 1) for other in ids if other == each]
            assert [(step.version, step.advantage) for step in found] == [(f"0-{n}", float(n)) for n in expected]
            assert since == "0-1"
        assert (await reader.of(across))[0] == []

        async def read_and_ack(*args: Any) -> list[bytes]:
            nonlocal num_steps
            page, num_steps = await lrange(*args), num_steps + 1
            await context.redis.rpush(key, record([known[0]], num_steps))
            await context.redis.ltrim(key, 1, -1)
            return page

        monkeypatch.setattr(context.redis, "lrange", read_and_ack)
        found = dict.fromkeys(int(step.version[2:]) for step in (await reader.of(known[0]))[0])
        assert list(found) == sorted(found)
        assert list(found)[-1] == len(steps)
        assert set(found) >= set(range(1 + num_steps - len(steps), len(steps) + 1))
        await context.durability.aclose()

    asyncio.run(compare())
