"""A buffer that scores in the background, with a reward service whose answers the test decides."""

from __future__ import annotations

from typing import Any

from tba.clients import BufferClient
from tba.wire import Rollout, decode_rollout, encode_rollout
from tests.support.buffer import make_prompts
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.redis_process import RedisProcess
from tests.support.reward_server import RewardServer

SECTIONS: dict[str, dict[str, Any]] = {"buffer": {"SCORE_EVERY_S": 0.05}}


def sections(reward: RewardServer, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the recipe sections of a buffer that scores with this reward service."""
    merged = {**SECTIONS, "reward": {"url": reward.url}}
    for name, values in more.items():
        merged[name] = {**merged.get(name, {}), **values}
    return merged


def scored_buffer(serve_buffer: ServeBuffer, reward: RewardServer, **more: dict[str, Any]) -> BufferClient:
    """Serve a buffer that scores with this reward service, upload prompts, and return a client."""
    client = serve_buffer(**sections(reward, **more)).client()
    client.upload_prompts(make_prompts(4))
    return client


def push(client: BufferClient, rollouts: list[Rollout]) -> list[str]:
    """Push rollouts; return the outcome of each."""
    return [outcome.outcome for outcome in client.push([encode_rollout(rollout) for rollout in rollouts]).outcomes]


def stored_rollouts(redis: RedisProcess) -> dict[bytes, Rollout]:
    """Return the rollouts in Redis, by id."""
    from redis import Redis

    with Redis.from_url(redis.url) as client:
        raw: Any = client.hgetall("tba:test:payloads")
    return {rollout_id: decode_rollout(payload) for rollout_id, payload in raw.items()}


def counters(redis: RedisProcess) -> dict[str, int]:
    """Return the counters of the run in Redis."""
    from redis import Redis

    with Redis.from_url(redis.url) as client:
        raw: Any = client.hgetall("tba:test:counters")
    return {name.decode(): int(value) for name, value in raw.items()}


def statuses(client: BufferClient) -> tuple[int, int, int]:
    """Return how many stored rollouts are scored, pending and failed."""
    stats = client.stats()
    return stats.num_scored, stats.num_pending, stats.num_failed
