"""`tba rescore`: stored rollouts go through the reward service again, each once, under any fault meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tba_buffer.scoring.reward_service import SCORE_MAX_ROLLOUTS

from tba.api import RescoreInfo, RescoreRequest
from tba.clients import BufferClient
from tba.errors import BadRequestError, ConflictError, NotFoundError
from tba.wire import Rollout, encode_rollout
from tests.integration.buffer.test_buffer_conversations import talk
from tests.support.buffer import make_prompts, make_rollout, start_lineage, start_stack
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.leases import draw
from tests.support.redis_process import RedisProcess
from tests.support.reward_server import Item, RewardServer
from tests.support.scored_buffer import counters, push, scored_buffer, sections, statuses, stored_rollouts
from tests.support.waits import until

ALL = RescoreRequest()


def make_many(num: int, **changes: Any) -> list[Rollout]:
    return [make_rollout(f"train-{i % 4}", reward=float(i), **changes) for i in range(num)]


def finished(client: BufferClient, request: RescoreRequest | None = None) -> RescoreInfo:
    """Start a job, unless one was started, and return it as it ends."""
    if request is not None:
        client.start_rescore(request)
    return until("the job ends", lambda: [job for job in [client.rescore()] if job.state != "running"])[0]


def filled(serve_buffer: ServeBuffer, reward: RewardServer, num: int, **more: dict[str, Any]) -> BufferClient:
    client = scored_buffer(serve_buffer, reward, **more)
    push(client, make_many(num))
    return client


def test_everything_stored_gets_the_reward_of_the_new_version_and_batches_hold_it(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    client = filled(serve_buffer, reward, 40, buffer={"SCORE_MAX_ROLLOUTS": 16})
    before = stored_rollouts(redis)
    with pytest.raises(NotFoundError):
        client.rescore()
    job = finished(client, ALL)
    assert (job.state, job.num_total, job.num_done, job.num_changed) == ("done", 40, 40, 39)  # one had a 10 before
    assert (job.num_failed, job.num_gone, job.reward_versions) == (0, 0, {"addition-2": 40})
    assert (job.num_known_before, job.num_known_after, job.mean_reward_before) == (40, 40, pytest.approx(19.5))
    assert job.mean_reward_after == pytest.approx(10.0)
    assert [len(items) for items in reward.requests] == [16, 16, 8]
    asked = [bytes.fromhex(item["item_id"]) for item in reward.asked]
    assert asked == [r.rollout_id for r in sorted(before.values(), key=lambda r: r.reward or 0.0)]  # oldest first
    for rollout_id, rollout in stored_rollouts(redis).items():
        assert encode_rollout(rollout) == encode_rollout(before[rollout_id].with_reward(10.0, "addition-2"))
    batch = draw(client, start_lineage(client))
    assert {(r.reward, r.reward_version) for r in batch.rollouts} == {(10.0, "addition-2")}
    assert client.stats().num_scored == 40
    assert counters(redis)["scored_total"] == 40  # no rollout was scored for the first time


def test_an_episode_keeps_what_its_environment_paid(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    client = scored_buffer(serve_buffer, reward)
    paid, broken = talk("train-0", reward=0.25), talk("train-0", reward=None).with_failure("environment: reset")
    push(client, [paid, broken, make_rollout("train-1", reward=3.0)])
    job = finished(client, ALL)
    assert (job.num_total, job.num_done, job.num_changed, job.num_gone) == (3, 3, 1, 0)
    assert client.get_rollout(paid.rollout_id.hex()).reward == 0.25
    assert client.get_rollout(broken.rollout_id.hex()).reward_status == "failed"  # never a number
    assert len(reward.asked) == 1


def test_scoring_again_replaces_the_parts_of_a_reward(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    scorers = [{"kind": "format", "pattern": "x", "gate": 1.0}, {"kind": "exact", "weight": 2.0}]
    reward.parts = {"format": 1.0, "exact": 5.0}
    changed = sections(reward)
    changed["reward"]["tasks"] = {"addition": {"scorers": scorers}}
    client = serve_buffer(**changed).with_prompts(4)
    push(client, make_many(2, reward_parts={"format": 0.0, "gone": 0.5}))

    def shown() -> list[dict[str, Any]]:
        (parts,) = {str(info.reward_parts): info.reward_parts for info in client.list_rollouts().rollouts}.values()
        return [part.model_dump() for part in parts or []]

    assert shown() == [{"name": "format", "score": 0.0, "weight": 0.0}, {"name": "gone", "score": 0.5, "weight": None}]
    finished(client, ALL)
    assert shown() == [{"name": "format", "score": 1.0, "weight": 0.0}, {"name": "exact", "score": 5.0, "weight": 2.0}]
    reward.score, reward.version = (lambda item: "timeout"), "addition-3"
    finished(client, ALL)
    assert shown() == []


def test_scoring_again_with_the_same_version_changes_nothing(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    client = filled(serve_buffer, reward, 12)
    finished(client, ALL)
    position = client.stats().log_position
    job = finished(client, ALL)
    assert (job.num_done, job.num_changed) == (12, 0)
    assert client.stats().log_position == position
    assert counters(redis)["rescored:scored"] == 12


def test_the_request_chooses_by_status_and_task(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    client = serve_buffer(**sections(reward)).client()
    other = [p.model_copy(update={"prompt_id": f"other-{p.prompt_id}", "task": "other"}) for p in make_prompts(2)]
    client.upload_prompts([*make_prompts(4), *other])
    failed = [make_rollout(reward=None, reward_status="failed", reward_reason="timeout: x") for _ in range(3)]
    push(client, [*make_many(5), *failed, *(make_rollout("other-train-0") for _ in range(2))])
    for request, num in [
        (RescoreRequest(only="failed"), 3),
        (RescoreRequest(task="other"), 2),
        (RescoreRequest(task="addition", only="scored"), 8),
        (RescoreRequest(only="failed"), 0),
        (RescoreRequest(only="pending"), 0),
    ]:
        job = finished(client, request)
        assert (job.task, job.only, job.num_done, job.num_total) == (request.task, request.only, num, num)
    with pytest.raises(BadRequestError, match="its tasks: addition, other"):
        client.start_rescore(RescoreRequest(task="adition"))


def test_a_failed_rollout_that_gets_its_first_reward_counts_as_scored_once(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    client = scored_buffer(serve_buffer, reward)
    failed = make_rollout("train-0", reward=None, reward_status="failed", reward_reason="timeout: x")
    push(client, [failed, make_rollout("train-1", reward=1.0)])
    for score, expected in [(10.0, (2, 0, 0)), ("exception", (0, 0, 2)), (11.0, (2, 0, 0))]:
        reward.score = lambda item, score=score: score
        finished(client, ALL)
        assert statuses(client) == expected
    assert counters(redis)["scored_total"] == 2


def test_an_error_makes_the_rollout_failed_and_its_old_reward_is_not_kept(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    client = filled(serve_buffer, reward, 8)
    answers = Counter[str]()

    def score(item: Item) -> float | str:
        answers[item["item_id"]] += 1
        return "timeout" if item["data"]["answer"] == 2 else 4.0

    reward.score = score
    job = finished(client, ALL)
    assert (job.num_done, job.num_failed, job.num_known_before, job.num_known_after) == (8, 2, 8, 6)
    assert statuses(client) == (6, 0, 2)
    failed = [r for r in stored_rollouts(redis).values() if r.reward_status == "failed"]
    why = "timeout: detail of timeout"
    assert {(r.prompt_id, r.reward, r.reward_reason) for r in failed} == {("train-1", None, why)}
    assert sorted(answers.values()) == [1] * 6 + [3] * 2


def test_while_the_reward_service_is_away_the_job_waits_and_nothing_fails(
    serve_buffer: ServeBuffer, reward: RewardServer
) -> None:
    client = filled(serve_buffer, reward, 8)
    reward.leave()
    client.start_rescore(ALL)
    (job,) = until("it says what it waits for", lambda: [job for job in [client.rescore()] if job.problem])
    assert (job.state, job.num_done) == ("running", 0)
    assert job.wait is not None
    assert (job.wait.owner, job.wait.name) == ("buffer-scorer", "reward")
    assert "does not answer" in (job.problem or "")
    assert statuses(client) == (8, 0, 0)
    reward.come_back()
    job = finished(client)
    assert (job.num_done, job.num_failed, job.problem, job.wait) == (8, 0, None, None)


def test_one_job_at_a_time(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    client = filled(serve_buffer, reward, 8, buffer={"SCORE_MAX_ROLLOUTS": 4})
    reward.refusal = lambda items: None if len(reward.requests) == 1 else (503, {"detail": "not now", "type": "x"})
    started = client.start_rescore(ALL)
    until("half is done", lambda: client.rescore().num_done == 4)
    assert client.start_rescore(ALL).started_at_s == started.started_at_s
    with pytest.raises(ConflictError, match=r"everything is being scored again since log position \d+ \(4 of 8 done\)"):
        client.start_rescore(RescoreRequest(only="scored"))
    reward.refusal = lambda items: None
    assert finished(client).num_done == 8
    assert finished(client, RescoreRequest(only="scored")).num_done == 8
    assert client.stats().num_scored == 8


def test_a_job_that_would_lose_every_reward_is_refused(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    client = filled(serve_buffer, reward, 4)
    reward.tasks = ["gsm8k"]
    with pytest.raises(ConflictError, match="no reward for addition"):
        client.start_rescore(ALL)
    assert statuses(client) == (4, 0, 0)
    with pytest.raises(NotFoundError):
        client.rescore()


def test_rollouts_that_are_evicted_meanwhile_are_counted_as_gone_and_new_ones_are_left_alone(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    client = filled(serve_buffer, reward, 12, buffer={"max_rollouts": 12, "SCORE_MAX_ROLLOUTS": 4})
    reward.gate.clear()
    client.start_rescore(ALL)
    until("the first four are asked", lambda: reward.requests)
    new = [make_rollout("train-0", reward=0.5) for _ in range(6)]
    push(client, new)  # evicts the first six: four that are being scored, two that wait for it
    reward.gate.set()
    job = finished(client)
    assert (job.num_total, job.num_done, job.num_gone) == (12, 6, 6)
    stored = stored_rollouts(redis)
    assert Counter(r.reward_version for r in stored.values()) == {"addition-2": 6, "addition-1": 6}
    assert {stored[r.rollout_id].reward for r in new} == {0.5}


def test_pushes_and_late_copies_continue_while_everything_is_scored_again(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    buffer = serve_buffer(**sections(reward, buffer={"SCORE_MAX_ROLLOUTS": 8}))
    client = buffer.with_prompts(4)
    old = make_many(200)
    push(client, old)
    over, outcomes = threading.Event(), Counter[str]()

    def push_on() -> None:
        mine = buffer.client()
        while not over.is_set():
            outcomes.update(push(mine, make_many(4)))
            outcomes.update(push(mine, old[:4]))

    pushers = [threading.Thread(target=push_on) for _ in range(2)]
    for pusher in pushers:
        pusher.start()
    job = finished(client, ALL)
    over.set()
    for pusher in pushers:
        pusher.join()
    assert job.num_done == job.num_total >= 200
    assert (set(outcomes), outcomes["new"]) == ({"new", "duplicate"}, outcomes["duplicate"])
    stored = stored_rollouts(redis)
    assert {stored[r.rollout_id].reward_version for r in old} == {"addition-2"}
    assert sum(r.reward_version == "addition-2" for r in stored.values()) == job.num_done
    assert client.stats().num_rollouts == 200 + outcomes["new"]
    assert push(client, old) == ["duplicate"] * 200


def test_pending_rollouts_that_become_scored_meanwhile_join_a_job_about_scored_ones(
    serve_buffer: ServeBuffer, reward: RewardServer
) -> None:
    reward.leave()
    client = scored_buffer(serve_buffer, reward, buffer={"SCORE_MAX_ROLLOUTS": 4})
    push(client, make_many(6))
    push(client, [make_rollout("train-0", reward=None) for _ in range(5)])
    assert client.start_rescore(RescoreRequest(only="scored")).num_total == 6
    reward.come_back()
    job = finished(client)
    assert (job.num_total, job.num_done, job.num_gone) == (11, 11, 0)
    assert statuses(client) == (11, 0, 0)


@pytest.mark.parametrize("victim", ["buffer", "redis"])
def test_a_killed_buffer_or_redis_continues_where_it_was_and_every_rollout_counts_once(
    tmp_path: Path, reward: RewardServer, victim: str
) -> None:
    num, stack = 10 * SCORE_MAX_ROLLOUTS, start_stack(tmp_path, reward={"url": reward.url})
    try:
        client = stack.client
        client.upload_prompts(make_prompts(4))
        rollouts = make_many(num)
        for at in range(0, num, 512):
            push(client, rollouts[at : at + 512])
        killing, release = threading.Event(), threading.Event()

        def hold_sometimes(items: list[Item]) -> None:
            if len(reward.requests) in (4, 7, 9):
                killing.set()
                release.wait(60)

        reward.refusal = hold_sometimes
        client.start_rescore(ALL)
        for _ in range(3):
            assert killing.wait(60)
            process = stack.buffer if victim == "buffer" else stack.redis
            process.kill()
            killing.clear()
            process.start()
            release.set()
            release.clear()
        release.set()
        job = finished(client)
        assert (job.state, job.num_total, job.num_done, job.num_gone) == ("done", num, num, 0)
        assert (job.num_known_before, job.num_known_after, job.reward_versions) == (num, num, {"addition-2": num})
        assert job.mean_reward_before == pytest.approx((num - 1) / 2)
        assert job.mean_reward_after == pytest.approx(10.0)
        stored = stored_rollouts(stack.redis)
        assert {(r.reward, r.reward_version) for r in stored.values()} == {(10.0, "addition-2")}
        asked = Counter(item["item_id"] for item in reward.asked)
        assert sum(asked.values()) - len(asked) <= 3 * SCORE_MAX_ROLLOUTS  # only what was not stored yet is asked again
        assert counters(stack.redis)["rescored:scored"] == num
        assert client.stats().num_scored == num
    finally:
        release.set()
        stack.stop()
