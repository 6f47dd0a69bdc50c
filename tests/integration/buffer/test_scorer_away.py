"""An HTTP endpoint that scores goes away and comes back: reward service and buffer lose no reward by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tba_buffer.scoring import retries

from tba.api import RescoreRequest
from tba.clients import BufferClient
from tba.wire import encode_rollout
from tests.support.buffer import make_rollout
from tests.support.buffer_fixtures import ServeBuffer, later, without_constants
from tests.support.index_values import Item, make_added, make_index
from tests.support.redis_process import RedisProcess
from tests.support.reward_process import running_reward
from tests.support.reward_server import RewardServer
from tests.support.scored_buffer import statuses, stored_rollouts
from tests.support.waits import until

AWAY = "scorer-away"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[RewardServer]:
    """The HTTP endpoint that scores."""
    server = RewardServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def reward_url(tmp_path_factory: pytest.TempPathFactory, endpoint: RewardServer) -> Iterator[str]:
    """A real reward service that asks the endpoint."""
    scorer = {"kind": "http", "url": f"{endpoint.url}/v1/score", "timeout_s": 30.0}
    tasks = {"addition": {"scorers": [scorer]}}
    with running_reward(tmp_path_factory.mktemp("reward"), num_workers=1, tasks=tasks) as url:
        yield url


@pytest.fixture
def client(serve_buffer: ServeBuffer, reward_url: str) -> BufferClient:
    """The client of a buffer that scores there, and has prompts."""
    return serve_buffer(buffer={"SCORE_EVERY_S": 0.02}, reward={"url": reward_url}).with_prompts(4)


@pytest.fixture
def away(endpoint: RewardServer) -> Iterator[RewardServer]:
    """The endpoint, which is gone; it is back after the test."""
    endpoint.leave()
    yield endpoint
    if endpoint._server.socket.fileno() < 0:
        endpoint.come_back()


def waits(client: BufferClient) -> list[str]:
    return [wait.name for wait in client.run().waits if wait.owner == "buffer-scorer"]


def test_rollouts_wait_for_an_endpoint_and_are_scored_when_it_is_back(
    client: BufferClient, away: RewardServer, redis: RedisProcess
) -> None:
    # other texts than in the tests that follow: the reward service remembers scores
    client.push([encode_rollout(make_rollout(reward=None, response_text=f"back {i}")) for i in range(4)])
    until("the wait is shown", lambda: waits(client) == [AWAY])
    assert statuses(client) == (0, 4, 0)
    away.come_back()
    later(client, retries.MAX_PAUSE_S)
    until("all are scored", lambda: statuses(client) == (4, 0, 0))
    until("the wait is over", lambda: waits(client) == [])
    assert {rollout.reward for rollout in stored_rollouts(redis).values()} == {10.0}


def test_they_are_failed_after_so_many_tries_and_hold_up_no_others(
    client: BufferClient, away: RewardServer, monkeypatch: pytest.MonkeyPatch, redis: RedisProcess
) -> None:
    without_constants(monkeypatch, {"MAX_TRIES": 4, "FIRST_PAUSE_S": 0.01})
    client.push([encode_rollout(make_rollout(reward=None)) for _ in range(3)])
    until("all are failed", lambda: statuses(client) == (0, 0, 3))
    assert all((r.reward_reason or "").startswith("unreachable: ") for r in stored_rollouts(redis).values())
    until("the wait is over", lambda: waits(client) == [])


def test_scoring_again_waits_for_an_endpoint_and_takes_no_reward_away(client: BufferClient, away: RewardServer) -> None:
    client.push([encode_rollout(make_rollout(f"train-{i % 4}", reward=1.0)) for i in range(8)])
    client.start_rescore(RescoreRequest())
    until("the wait is shown", lambda: waits(client) == [AWAY])
    job = client.rescore()
    assert (job.state, job.num_done) == ("running", 0)
    assert "unreachable" in (job.problem or "")
    assert statuses(client) == (8, 0, 0)
    away.come_back()
    later(client, retries.MAX_PAUSE_S)
    until("the job is done", lambda: client.rescore().state == "done")
    job = client.rescore()
    assert (job.num_done, job.num_failed, job.num_changed) == (8, 0, 8)


def test_scoring_again_ends_though_one_of_its_request_is_given_up_before_the_other(
    client: BufferClient, away: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_constants(monkeypatch, {"MAX_TRIES": 4, "FIRST_PAUSE_S": 0.01})
    record, recorded = retries.RetryQueue.record_away, set[int]()

    def first_is_a_try_ahead(self: retries.RetryQueue, position: int, reason: str) -> bool:
        if not recorded:
            record(self, position, reason)
        recorded.add(position)
        return record(self, position, reason)

    monkeypatch.setattr(retries.RetryQueue, "record_away", first_is_a_try_ahead)
    client.push([encode_rollout(make_rollout(response_text=f"unheard of {i}")) for i in range(2)])
    client.start_rescore(RescoreRequest())
    until("the job is done", lambda: client.rescore().state == "done")
    assert (client.rescore().num_failed, len(recorded)) == (2, 2)
    until("the wait is over", lambda: waits(client) == [])


class Clock:
    """Seconds that a test lets pass."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_repeated_request_is_half_as_large_and_what_is_new_has_its_turn() -> None:
    clock: Any = Clock()
    waiting = retries.RetryQueue(clock)
    old, sizes = list(range(64)), []
    for _ in range(9):
        asked = waiting.next_due(old, 64)
        sizes.append(len(asked))
        for at in old:  # the other requests fail meanwhile, too
            waiting.record_away(at, "unreachable: away")
        assert waiting.next_due([*old, 99], 64) == [99]
        assert waiting.is_too_early(old)
        assert not waiting.is_too_early([99])
        clock.now_s += retries.MAX_PAUSE_S
    assert sizes == [64, 32, 16, 8, 4, 2, 1, 1, 1]
    turns = [waiting.next_due([*old, 99], 64) for _ in range(4)]
    assert turns[0] != turns[1]
    assert turns[:2] == turns[2:]
    assert waiting.next_due(list(range(1000, 1200)), 64) == list(range(1000, 1200))
    index = make_index(make_added(1, [Item() for _ in range(62)]))  # positions 1 to 62
    clock.now_s += retries.REMOVE_GONE_EVERY_S
    waiting.remove_gone(index)
    assert (len(waiting), waiting.problem) == (62, "unreachable: away")
    clock.now_s += retries.REMOVE_GONE_EVERY_S
    waiting.remove_gone(make_index())
    assert (len(waiting), waiting.problem) == (0, None)
    waiting.record_away(1, "unreachable: away")
    waiting.remove([1])
    assert (len(waiting), waiting.problem) == (0, None)
