"""Rollouts whose reward is unknown: kept, never drawn, scored when the reward service is back, failed with a reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tba.wire import Rollout, encode_rollout
from tests.support.buffer import begin_run, make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.leases import draw, wait_of
from tests.support.redis_process import RedisProcess
from tests.support.reward_server import Item, RewardServer
from tests.support.scored_buffer import counters, push, scored_buffer, sections, statuses, stored_rollouts
from tests.support.waits import until

REASON = "the reward service did not answer for 10 s"


def pending(num: int, prompt_id: str = "train-0", **changes: Any) -> list[Rollout]:
    return [make_rollout(prompt_id, reward=None, reward_reason=REASON, **changes) for _ in range(num)]


def test_pending_rollouts_wait_while_the_reward_service_is_away_and_are_scored_when_it_is_back(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    reward.leave()
    client = scored_buffer(serve_buffer, reward)
    lineage = start_lineage(client)
    rollouts = [rollout for i in range(4) for rollout in pending(4, f"train-{i}")]
    assert push(client, rollouts) == ["new"] * 16

    (wait,) = until("a named wait", lambda: [w for w in client.run().waits if w.owner == "buffer-scorer"])
    assert (wait.name, wait.deadline_in_s > 0) == ("reward", True)
    assert statuses(client) == (0, 16, 0)
    assert wait_of(client, lineage) == "rollouts"
    assert {r.reward_status for r in stored_rollouts(redis).values()} == {"pending"}

    reward.come_back()
    until("all are scored", lambda: statuses(client) == (16, 0, 0))
    until("the wait is over", lambda: not [w for w in client.run().waits if w.owner == "buffer-scorer"])
    batch = draw(client, lineage)
    assert {(r.reward, r.reward_version, r.reward_reason) for r in batch.rollouts} == {(10.0, "addition-2", None)}
    sent = {r.rollout_id: r for r in rollouts}
    for rollout_id, rollout in stored_rollouts(redis).items():
        assert encode_rollout(rollout) == encode_rollout(sent[rollout_id].with_reward(10.0, "addition-2"))
    counts = counters(redis)
    assert (counts["rescored:scored"], counts["scored_total"], counts["generated"]) == (16, 16, 16)


def test_the_scorer_asks_what_a_searcher_asks(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    client = scored_buffer(serve_buffer, reward)
    rollout = make_rollout("train-1", reward=None, response_text="so viel: 7", finish_reason="length", task="another")
    push(client, [rollout])
    until("it is asked", lambda: reward.requests)
    assert reward.asked[0] == {
        "item_id": rollout.rollout_id.hex(),
        "task": "addition",
        "prompt": "1+1=",
        "response": "so viel: 7",
        "data": {"answer": 2},
        "finish_reason": "length",
    }


def test_the_scorer_sends_tokens_for_tasks_of_python_functions(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    settings = sections(reward)
    tasks = {"addition": {"scorers": [{"kind": "python", "function": "tests.support.trl_rewards:num_tokens"}]}}
    client = serve_buffer(**{**settings, "reward": {**settings["reward"], "tasks": tasks}}).with_prompts(2)
    rollout = make_rollout("train-1", reward=None)
    push(client, [rollout])
    until("it is asked", lambda: reward.requests)
    assert reward.asked[0]["response_tokens"] == rollout.response_tokens.tolist()


@pytest.mark.parametrize("reason", ["bad_data", "unknown_task", "exception", "not_finite", "timeout"])
def test_a_score_that_is_an_error_makes_the_rollout_failed_with_the_reason_and_never_a_number(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer, reason: str
) -> None:
    reward.score = lambda item: reason if item["response"] == "broken" else 1.0
    client = scored_buffer(serve_buffer, reward)
    (broken,) = pending(1, response_text="broken")
    push(client, [*pending(2), broken])
    until("all are done", lambda: statuses(client) == (2, 0, 1))
    stored = stored_rollouts(redis)[broken.rollout_id]
    assert (stored.reward, stored.reward_status) == (None, "failed")
    assert stored.reward_reason == f"{reason}: detail of {reason}"
    tries = Counter(item["item_id"] for item in reward.asked)
    assert tries.pop(broken.rollout_id.hex()) == (3 if reason == "timeout" else 1)
    assert set(tries.values()) == {1}
    counts = counters(redis)
    assert (counts["rescored:scored"], counts["rescored:failed"], counts["scored_total"]) == (2, 1, 2)


def test_an_item_that_times_out_once_is_asked_again_and_scored(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    reward.score = lambda item: "timeout" if len(reward.requests) == 1 else 2.0
    client = scored_buffer(serve_buffer, reward)
    push(client, pending(3))
    until("all are scored", lambda: statuses(client) == (3, 0, 0))


def test_no_batch_ever_holds_a_rollout_without_a_reward(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    reward.score = lambda item: "exception" if item["response"] == "broken" else 3.0
    client = serve_buffer(**sections(reward, buffer={"SCORE_MAX_ROLLOUTS": 4, "SCORE_EVERY_S": 0.01})).client()
    lineage = begin_run(client, 4, per_prompt=4)
    scored, step = 0, 0
    for at in range(30):
        push(client, pending(2, f"train-{at % 4}") + pending(1, f"train-{at % 4}", response_text="broken"))
        for rollout in draw(client, lineage, step + 1).rollouts:
            assert rollout.reward_status == "scored"
            assert rollout.response_text != "broken"
            scored += rollout.reward == 3.0
    until("all are done", lambda: client.stats().num_pending == 0)
    assert statuses(client) == (16 + 60, 0, 30)


def test_requests_are_cut_until_the_service_takes_them_and_one_that_is_refused_alone_is_failed(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    def refuse(items: list[Item]) -> tuple[int, dict[str, Any]] | None:
        if sum(len(item["response"]) for item in items) < 100:
            return None
        return 413, {"type": "urn:tba:too-large", "title": "", "status": 413, "detail": "the limit is 100"}

    reward.refusal = refuse
    client = scored_buffer(serve_buffer, reward)
    (large,) = pending(1, response_text="x" * 200)
    push(client, [*pending(5, response_text="y" * 30), large, *pending(2, response_text="y" * 30)])
    until("all are done", lambda: statuses(client) == (7, 0, 1))
    assert stored_rollouts(redis)[large.rollout_id].reward_reason == "refused: the limit is 100"


def test_a_busy_reward_service_is_waited_for_under_the_name_that_it_gives(
    serve_buffer: ServeBuffer, reward: RewardServer
) -> None:
    busy = {"type": "urn:tba:busy", "title": "", "status": 429, "detail": "", "retry_after_s": 0.1}
    reward.refusal = lambda items: (429, {**busy, "wait": "reward-workers"})
    client = scored_buffer(serve_buffer, reward)
    push(client, pending(2))
    until("the wait", lambda: ("buffer-scorer", "reward-workers") in [(w.owner, w.name) for w in client.run().waits])
    reward.refusal = lambda items: None
    until("all are scored", lambda: statuses(client) == (2, 0, 0))


def test_after_a_failure_requests_are_smaller_and_grow_again(serve_buffer: ServeBuffer, reward: RewardServer) -> None:
    away = (503, {"type": "urn:tba:unavailable", "title": "", "status": 503, "detail": "no"})
    reward.refusal = lambda items: away if len(items) > 4 else None
    client = scored_buffer(serve_buffer, reward, buffer={"SCORE_MAX_ROLLOUTS": 16})
    push(client, pending(40))
    until("all are scored", lambda: statuses(client) == (40, 0, 0))
    sizes = [len(items) for items in reward.requests]
    assert sizes[:8] == [16, 8, 4, 5, 2, 3, 4, 5]


def test_rollouts_evicted_while_they_are_scored_leave_no_trace(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    reward.gate.clear()
    client = scored_buffer(serve_buffer, reward, buffer={"max_rollouts": 8})
    old = pending(4)
    push(client, old)
    until("they are being scored", lambda: reward.requests)
    new = [make_rollout("train-1") for _ in range(6)]
    push(client, new)
    reward.gate.set()
    until("the others are scored", lambda: statuses(client) == (8, 0, 0))
    assert set(stored_rollouts(redis)) == {r.rollout_id for r in (*old[2:], *new)}
    counts = counters(redis)
    assert (counts["rescored:scored"], counts["scored_total"], counts["evicted:max_rollouts"]) == (2, 8, 2)


def test_a_late_copy_of_a_push_is_a_duplicate_also_after_its_rollout_was_scored(
    serve_buffer: ServeBuffer, reward: RewardServer
) -> None:
    client = scored_buffer(serve_buffer, reward)
    rollouts = pending(3)
    push(client, rollouts)
    until("all are scored", lambda: statuses(client) == (3, 0, 0))
    assert push(client, rollouts) == ["duplicate"] * 3
    assert push(client, [make_rollout(rollout_id=rollouts[0].rollout_id)]) == ["refused"]
    assert statuses(client) == (3, 0, 0)


def test_the_scorer_shows_a_searchers_token(serve_buffer: ServeBuffer, reward: RewardServer, tmp_path: Path) -> None:
    tokens = {role: f"{role}-0123456789abcdef" for role in ("searcher", "trainer", "operator", "viewer")}
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    buffer = serve_buffer(tokens=tokens, **sections(reward, auth={"tokens_file": str(tmp_path / "tokens.json")}))
    buffer.client(token=tokens["operator"]).upload_prompts(make_prompts(2))
    push(buffer.client(token=tokens["searcher"]), pending(1))
    until("it is asked", lambda: reward.requests)
    assert reward.tokens == {f"Bearer {tokens['searcher']}"}


def test_a_process_that_another_one_has_replaced_stores_no_reward_any_more(
    serve_buffer: ServeBuffer, redis: RedisProcess, reward: RewardServer
) -> None:
    reward.gate.clear()
    reward.score = lambda item: 7.0 if any(item is first for first in reward.requests[0]) else 10.0
    old = serve_buffer(**sections(reward))
    client = old.with_prompts(2)
    push(client, pending(2))
    until("the old process asks", lambda: len(reward.requests) == 1)
    newer = serve_buffer(**sections(reward)).client()
    until("the newer process asks, too", lambda: len(reward.requests) == 2)
    reward.gate.set()
    until("all are scored", lambda: statuses(newer) == (2, 0, 0))
    old.stop()
    assert {rollout.reward for rollout in stored_rollouts(redis).values()} == {10.0}
    assert counters(redis)["rescored:scored"] == 2
