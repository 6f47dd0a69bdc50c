"""POST /v1/samples: reading by priority, beside training."""

from __future__ import annotations

from collections import Counter

import httpx2
import numpy as np
import pytest
from redis import Redis

from tba.api import BatchRequest
from tba.errors import BusyError, UnavailableError
from tba.wire import encode_rollout
from tests.support.buffer import make_payloads, make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.redis_process import RedisProcess


def test_a_sample_is_reproduced_by_its_seed_and_records_nothing(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(sampling={"min_size_to_sample": 1000, "samples_per_insert": 0.001}).client()
    client.upload_prompts(make_prompts(8))
    client.push(make_payloads([f"train-{i}" for i in range(8)], per_prompt=6))
    before = client.stats()
    first = client.sample(20)
    again = client.sample(20, seed=first.seed)
    assert [r.rollout_id for r in again.rollouts] == [r.rollout_id for r in first.rollouts]
    assert len({r.rollout_id for r in first.rollouts}) == 20
    assert again.seed == first.seed
    assert again.log_position == first.log_position == before.log_position
    assert client.sample(20).seed != first.seed
    after = client.stats()
    assert (after.rollouts_drawn, after.log_position, after.slots) == (0, before.log_position, before.slots)


def test_a_sample_follows_the_rewards(serve_buffer: ServeBuffer) -> None:
    """p of a reward of 2 against one of 0 is e^2, with replacement; a failed or unknown reward is never drawn."""
    sampling = {"reward_inverse_temperature": 1.0, "replacement": True}
    client = serve_buffer(sampling=sampling).client()
    client.upload_prompts(make_prompts(2))
    rollouts = [make_rollout(f"train-{i % 2}", reward=float(i % 3)) for i in range(12)]
    failed = make_rollout(reward=None, reward_status="failed", reward_reason="timeout")
    client.push([encode_rollout(rollout) for rollout in (*rollouts, failed)])
    counts: Counter[float | None] = Counter()
    for seed in range(8):
        counts.update(rollout.reward for rollout in client.sample(512, seed=seed).rollouts)
    assert set(counts) == {0.0, 1.0, 2.0}
    weights = np.exp([0.0, 1.0, 2.0])
    expected = 4096 * weights / weights.sum()
    found = np.array([counts[0.0], counts[1.0], counts[2.0]])
    assert ((found - expected) ** 2 / expected).sum() < 18.4  # chi-square, 2 degrees of freedom: p = 1e-4


def test_without_a_scored_rollout_a_sample_is_asked_to_come_back(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    client = buffer.client()
    client.upload_prompts(make_prompts(1))
    client.push([encode_rollout(make_rollout(reward=None))])
    with pytest.raises(BusyError) as caught:
        client.sample(1)
    assert caught.value.wait == "rollouts"
    answer = httpx2.post(f"{buffer.url}/v1/samples", json={"num": 1}, timeout=60)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert (answer.json()["wait"], answer.json()["retry_after_s"]) == ("rollouts", 0.25)


@pytest.mark.parametrize(
    ("body", "field"),
    [({"num": 0}, "num"), ({"num": 513}, "num"), ({"num": 1, "seed": -1}, "seed"), ({"num": 1, "seed": 2**63}, "seed")],
)
def test_a_sample_of_an_impossible_size_or_seed_is_refused(serve_buffer: ServeBuffer, body: dict, field: str) -> None:
    answer = httpx2.post(f"{serve_buffer().url}/v1/samples", json=body, timeout=60)
    assert (answer.status_code, field in answer.json()["detail"]) == (422, True)


def test_payloads_that_redis_lost_are_not_called_evicted(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    buffer = serve_buffer()
    client = buffer.client(retry_s=0)
    client.upload_prompts(make_prompts(4))
    reply = start_lineage(client)
    client.push(make_payloads([f"train-{i}" for i in range(4)], per_prompt=6))
    with Redis.from_url(redis.url) as direct:
        direct.delete("tba:test:payloads")
    with pytest.raises(UnavailableError, match="in the log but their payloads are not in Redis"):
        client.sample(4)
    request = {"lineage": reply.lineage, "token": reply.token, "trainer_id": "t", "step": 1, "wait_s": 5}
    with pytest.raises(UnavailableError, match="in the log but their payloads are not in Redis"):
        client.draw_batch(BatchRequest(**request))
