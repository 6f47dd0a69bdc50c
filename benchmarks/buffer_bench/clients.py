"""The client processes of benchmarks/buffer.py: each function prepares one client and returns its call."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgpack
from redis import Redis

from benchmarks.buffer_bench.direct import direct_push
from benchmarks.buffer_bench.work import Work
from tba.api import AckRequest, BatchRequest
from tba.clients import BufferClient
from tba.fields import StrictModel

Call = Callable[[], int]


def body_of(client: BufferClient, path: str, request: StrictModel) -> bytes:
    """The undecoded reply of a draw."""
    return client._call("POST", path, json=request.model_dump_json().encode()).content


def http_pusher(number: int, *, url: str, num_bytes: int, num_prompts: int) -> Call:
    """Push 64 rollouts over HTTP with the product's own client."""
    client = BufferClient(url, retry_s=0)
    work = Work(num_bytes=num_bytes, num_prompts=num_prompts, seed=number)

    def push() -> int:
        outcomes = client.push(work.push()).outcomes
        assert all(item.outcome == "new" for item in outcomes)
        return len(outcomes)

    return push


def redis_pusher(number: int, *, redis_url: str, run: str, num_bytes: int, num_prompts: int) -> Call:
    """Push 64 rollouts straight to Redis: the same Lua call, no HTTP, no validation."""
    push = direct_push(Redis.from_url(redis_url), run)
    work = Work(num_bytes=num_bytes, num_prompts=num_prompts, seed=number)
    return lambda: push(work.push())


def http_drawer(
    number: int,
    *,
    url: str,
    lineage: int,
    token: str,
    num_clients: int,
    num_rollouts: int = 64,
    min_bytes: int = 18_000,
) -> Call:
    """Draw fresh batches of 8 groups of 8, each for a step of its own; the body is read, not decoded."""
    client, step = BufferClient(url, retry_s=0), [number + 1]

    def draw() -> int:
        request = BatchRequest(trainer_id=f"t{number}", lineage=lineage, step=step[0], token=token)
        step[0] += num_clients
        body = body_of(client, "/v1/batches", request)
        assert len(body) > min_bytes
        return num_rollouts

    return draw


def redis_reader(number: int, *, redis_url: str, run: str, num_rollouts: int) -> Call:
    """Read random rollouts straight from Redis, one call per batch."""
    redis, rng, key = Redis.from_url(redis_url), random.Random(number), f"tba:{run}:payloads"
    ids: list[bytes] = redis.hrandfield(key, 4096)  # type: ignore[assignment]
    return lambda: len(redis.hmget(key, rng.choices(ids, k=num_rollouts)))  # type: ignore[arg-type]


def trainer(number: int, *, url: str, lineage: int, token: str, num_rollouts: int) -> Call:
    """Draw a batch and ack it, step after step; the body is read, not decoded."""
    client, step = BufferClient(url, retry_s=0), [1]

    def train() -> int:
        request = BatchRequest(trainer_id="t", lineage=lineage, step=step[0], token=token, wait_s=5.0)
        batch_id = msgpack.unpackb(body_of(client, "/v1/batches", request))["batch_id"]
        ack = AckRequest(lineage=lineage, step=step[0], token=token, policy_ages=[0] * num_rollouts)
        client.ack(batch_id, ack)
        step[0] += 1
        return num_rollouts

    return train
