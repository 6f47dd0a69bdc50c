"""Scoring while replies of Redis get lost, and while the service ends: in one process, for the test to interfere."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest
from tba_buffer.run.components import Components
from tba_buffer.scoring import retries, reward_service
from tba_buffer.service import Buffer

from tba.api import RescoreInfo, RescoreRequest
from tba.clients import RewardClient
from tba.errors import NotFoundError, UnavailableError
from tba.wire import decode_rollout, encode_rollout
from tests.support.buffer import make_recipe, make_rollout
from tests.support.buffer_fixtures import StartService, copy_of, go_back, without_constants
from tests.support.reward_server import RewardServer

NUM_ROLLOUTS = 60


@pytest.fixture
async def buffer(start_service: StartService, reward: RewardServer) -> Buffer:
    return await start_service(buffer={"SCORE_EVERY_S": 0.01, "SCORE_MAX_ROLLOUTS": 4}, reward={"url": reward.url})


async def finished(buffer: Buffer) -> RescoreInfo:
    while (job := await buffer.rescore_jobs.info()).state == "running":
        await asyncio.sleep(0.01)
    return job


@pytest.mark.parametrize("seed", range(3))
async def test_no_rollout_is_left_out_or_counted_twice_when_redis_does_not_answer(
    buffer: Buffer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, scripts, num_lost = random.Random(seed), buffer.context.scripts, 0
    run = scripts.run

    async def lossy(name: str, *payloads: bytes, **args: Any) -> Any:
        nonlocal num_lost
        fault = rng.choice(["none", "before", "after"]) if name == "score" else "none"
        num_lost += fault != "none"
        if fault == "before":
            raise UnavailableError("not sent")
        reply = await run(name, *payloads, **args)
        if fault == "after":
            raise UnavailableError("the reply is lost")
        return reply

    rollouts = [make_rollout(f"train-{i % 4}", reward=float(i)) for i in range(NUM_ROLLOUTS)]
    pending = [make_rollout("train-0", reward=None) for _ in range(NUM_ROLLOUTS)]
    await buffer.writer.push([encode_rollout(rollout) for rollout in rollouts])
    await buffer.rescore_jobs.start(RescoreRequest(only="scored"))
    monkeypatch.setattr(scripts, "run", lossy)
    await buffer.writer.push([encode_rollout(rollout) for rollout in pending])
    job = await finished(buffer)
    while (stats := await buffer.stats.read()).num_pending:
        await asyncio.sleep(0.01)
    assert num_lost > 5
    assert (job.num_total, job.num_done, job.num_gone, job.num_failed) == (NUM_ROLLOUTS, NUM_ROLLOUTS, 0, 0)
    assert job.num_changed == NUM_ROLLOUTS - 1  # one had a 10 before
    assert job.reward_versions == {"addition-2": NUM_ROLLOUTS}
    assert job.mean_reward_before == pytest.approx((NUM_ROLLOUTS - 1) / 2)
    stored = await buffer.context.redis.hvals(buffer.context.keys.payloads)
    assert {(r.reward, r.reward_version) for r in map(decode_rollout, stored)} == {(10.0, "addition-2")}
    counters = await buffer.context.counters()
    assert counters["rescored:scored"] == counters["scored_total"] == stats.num_scored == 2 * NUM_ROLLOUTS


async def test_pending_rollouts_that_are_being_scored_when_a_job_about_them_starts_leave_it(
    buffer: Buffer, reward: RewardServer
) -> None:
    reward.gate.clear()
    await buffer.writer.push([encode_rollout(make_rollout(reward=None)) for _ in range(4)])
    while not reward.requests:
        await asyncio.sleep(0.01)
    await buffer.writer.push([encode_rollout(make_rollout(reward=None)) for _ in range(3)])
    assert (await buffer.rescore_jobs.start(RescoreRequest(only="pending"))).num_total == 7
    reward.gate.set()
    job = await finished(buffer)
    assert (job.num_total, job.num_done, job.num_gone) == (7, 3, 4)
    assert len(reward.asked) == 7
    assert (await buffer.stats.read()).num_scored == 7


async def run_until_settled(buffer: Buffer) -> set[str]:
    """Run until nothing is pending; return the names of the scorer's waits that were seen meanwhile."""
    seen: set[str] = set()
    while (await buffer.stats.read()).num_pending:
        seen |= {wait.name for wait in (await buffer.components.read())[1] if wait.owner == "buffer-scorer"}
        await asyncio.sleep(0.01)
    return seen


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_constants(monkeypatch, {"MIN_PAUSE_S": 0.01, "MIN_PARKED_S": 0.01, "MAX_PARKED_S": 0.02})


@pytest.mark.usefixtures("quick")
async def test_a_rollout_that_breaks_the_reward_service_holds_up_no_other_and_is_failed_in_the_end(
    buffer: Buffer, reward: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_constants(monkeypatch, {"MIN_PARKED_S": 60.0, "MAX_PARKED_S": 60.0})
    poison = make_rollout(reward=None, response_text="poison")
    reward.refusal = lambda items: (500, {}) if any(item["response"] == "poison" for item in items) else None
    await buffer.writer.push([encode_rollout(poison)])
    await buffer.writer.push([encode_rollout(make_rollout(reward=None)) for _ in range(10)])
    while (await buffer.stats.read()).num_scored < 10:
        await asyncio.sleep(0.01)
    waits = [wait.name for wait in (await buffer.components.read())[1] if wait.owner == "buffer-scorer"]
    assert waits == ["reward"], "it still waits"
    assert (await buffer.stats.read()).num_pending == 1
    for parked in buffer.scoring_worker._scorer.retry_queue._waiting.values():
        parked.retry_at_s = buffer.context.clock()
    monkeypatch.setattr(retries, "MIN_PARKED_S", 0.01)
    assert await run_until_settled(buffer) == {"reward"}
    stored = decode_rollout(await buffer.context.redis.hget(buffer.context.keys.payloads, poison.rollout_id))
    assert stored.reward_status == "failed"
    assert (stored.reward_reason or "").startswith("refused: ")
    assert len([1 for items in reward.requests if [item["response"] for item in items] == ["poison"]]) == 5
    assert [wait for wait in (await buffer.components.read())[1] if wait.owner == "buffer-scorer"] == []


@pytest.mark.usefixtures("quick")
async def test_a_job_gets_past_a_rollout_that_breaks_the_reward_service(buffer: Buffer, reward: RewardServer) -> None:
    reward.refusal = lambda items: (500, {}) if any(item["response"] == "poison" for item in items) else None
    rollouts = [make_rollout(response_text="poison" if i == 3 else "") for i in range(8)]
    await buffer.writer.push([encode_rollout(rollout) for rollout in rollouts])
    await buffer.rescore_jobs.start(RescoreRequest())
    job = await finished(buffer)
    assert (job.num_done, job.num_failed) == (8, 1)


@pytest.mark.usefixtures("quick")
async def test_a_service_that_scores_nothing_at_all_refuses_nothing(
    buffer: Buffer, reward: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GET /v1/rewards is answered all the time."""
    monkeypatch.setattr(retries, "SILENT_TRIES", 1)
    await buffer.writer.push([encode_rollout(make_rollout(reward=None))])
    await run_until_settled(buffer)
    reward.refusal = lambda items: (500, {})
    await buffer.writer.push([encode_rollout(make_rollout(reward=None)) for _ in range(2)])
    num_before = len(reward.requests)
    while len(reward.requests) < num_before + 6:
        await asyncio.sleep(0.01)
    assert (await buffer.stats.read()).num_pending == 2
    reward.refusal = lambda items: None
    await run_until_settled(buffer)
    assert (await buffer.stats.read()).num_scored == 3


@pytest.mark.usefixtures("quick")
async def test_a_service_that_is_away_or_busy_refuses_nothing(
    buffer: Buffer, reward: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one try may count: away when asked, back when looked after
    monkeypatch.setattr(retries, "SILENT_TRIES_UNPROVEN", 2)
    attempts = 0
    ask = buffer.scoring_worker._reward.ask

    async def counted(call: Any) -> Any:
        nonlocal attempts
        attempts += 1
        return await ask(call)

    monkeypatch.setattr(buffer.scoring_worker._reward, "ask", counted)
    reward.refusal = lambda items: (429, {"type": "urn:tba:problem:busy", "detail": "full", "retry_after_s": 0.01})
    await buffer.writer.push([encode_rollout(make_rollout(reward=None))])
    while attempts < 4:
        await asyncio.sleep(0.01)
    reward.leave()
    while attempts < 8:
        await asyncio.sleep(0.01)
    assert (await buffer.stats.read()).num_pending == 1
    reward.refusal = lambda items: None
    reward.come_back()
    await run_until_settled(buffer)
    assert (await buffer.stats.read()).num_scored == 1


async def test_the_task_ends_although_the_reward_service_does_not_answer(buffer: Buffer, reward: RewardServer) -> None:
    await buffer.writer.push([encode_rollout(make_rollout(reward=None))])
    reward.gate.clear()
    while not reward.requests:
        await asyncio.sleep(0.01)
    await buffer.scoring_worker.stop()
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "scorer"] == []
    assert not reward.gate.is_set()


async def test_a_slow_answer_is_waited_for_as_long_as_the_reward_service_may_take(buffer: Buffer) -> None:
    def away(client: RewardClient) -> None:
        raise UnavailableError("away")

    slow = {"addition": {"scorers": [{"kind": "exact", "timeout_s": 270.0}]}}
    recipe = make_recipe(reward={"tasks": slow})
    context = dataclasses.replace(buffer.context, recipe=recipe)
    link = reward_service.RewardConnection(context, Components(context))
    with pytest.raises(reward_service.RewardUnavailableError):
        await link.ask(away)
    assert link.wait is not None
    assert link.wait.deadline_in_s > 300
    link.end_wait()
    link.close()


async def test_what_replaces_lost_rollouts_inherits_no_tries_and_no_job(buffer: Buffer, reward: RewardServer) -> None:
    earlier = await copy_of(buffer.context.redis)
    reward.gate.clear()
    await buffer.writer.push([encode_rollout(make_rollout(reward=2.0)) for _ in range(12)])
    await buffer.rescore_jobs.start(RescoreRequest())
    while not reward.requests:
        await asyncio.sleep(0.01)
    last, queue = buffer.view.index.position, buffer.scoring_worker._scorer.retry_queue
    assert not any(queue.record_away(last, "unreachable: it is away") for _ in range(retries.MAX_TRIES - 1))
    assert not any(queue.record_silence(last, is_unproven=False) for _ in range(retries.SILENT_TRIES - 1))
    await go_back(buffer.context.redis, earlier)
    await buffer.recovery.accept("operator", None)
    others = [make_rollout(reward=1.0) for _ in range(12)]
    await buffer.writer.push([encode_rollout(rollout) for rollout in others])
    queue = buffer.scoring_worker._scorer.retry_queue
    assert not queue.record_away(last, "unreachable: it is away")
    assert not queue.record_silence(last, is_unproven=False)
    reward.gate.set()
    await buffer.writer.push([encode_rollout(make_rollout(reward=None))])
    await run_until_settled(buffer)  # scored after the chunk that was under way: the job is over then
    with pytest.raises(NotFoundError):
        await buffer.rescore_jobs.info()
    ids = [rollout.rollout_id for rollout in others]
    payloads = await buffer.context.redis.hmget(buffer.context.keys.payloads, ids)
    assert {decode_rollout(payload).reward for payload in payloads} == {1.0}


async def test_a_score_of_a_lost_rollout_is_not_of_the_one_in_its_place(buffer: Buffer, reward: RewardServer) -> None:
    earlier = await copy_of(buffer.context.redis)
    lost, other = make_rollout(reward=None), make_rollout(reward=1.0)
    reward.gate.clear()
    await buffer.writer.push([encode_rollout(lost)])
    while not reward.requests:
        await asyncio.sleep(0.01)
    await go_back(buffer.context.redis, earlier)
    await buffer.recovery.accept("operator", None)
    await buffer.writer.push([encode_rollout(other)])
    await buffer.writer.push([encode_rollout(lost)])  # once more, and at another position
    reward.gate.set()
    async with asyncio.timeout(30):
        await run_until_settled(buffer)
    index = await buffer.view.catch_up()
    rows = index.live_rows()
    assert index.rollout_ids(rows) == [other.rollout_id, lost.rollout_id]
    assert index.column("reward", rows).tolist() == [1.0, 10.0]
