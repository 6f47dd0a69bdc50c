"""Damaged counts and lineages evict nothing, `/readyz` says why leases are refused, and the audit stays whole."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from tba_buffer.storage.keys import Keys

from tba.api import LineageRequest
from tba.errors import UnavailableError
from tba.versions import PolicyVersion
from tba.wire import encode_rollout
from tests.support.buffer import make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.buffer_reads import ask
from tests.support.redis_process import RedisProcess
from tests.support.waits import until

KEYS = Keys("test")
COUNTS = [("counters", name) for name in ("drawn", "void", "inflight", "marks", "scored_total", "scored_at_mark")]


def readiness(url: str) -> tuple[int, bytes]:
    return ask(url, "/readyz")


@pytest.mark.parametrize(("key", "field"), [*COUNTS, ("run", "step"), ("run", "latest_version"), ("run", "rollback")])
def test_what_leases_cannot_do_without_makes_the_service_not_ready_until_it_is_restored(
    serve_buffer: ServeBuffer, redis: RedisProcess, key: str, field: str
) -> None:
    url = serve_buffer().url
    with Redis.from_url(redis.url) as store:
        whole = store.hget(getattr(KEYS, key), field)
        store.hset(getattr(KEYS, key), field, b"\xff")
        until("not ready, by name", lambda: readiness(url)[0] == 503 and field.encode() in readiness(url)[1])
        if whole is None:
            store.hdel(getattr(KEYS, key), field)
        else:
            store.hset(getattr(KEYS, key), field, whole)  # pyright: ignore[reportArgumentType]
    until("ready", lambda: readiness(url)[0] == 200)


def test_a_damaged_lineage_lets_no_rollout_look_too_old(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    settings: dict[str, Any] = {"max_policy_age_steps": 10}
    server = serve_buffer(buffer=settings)
    client = server.client()
    client.upload_prompts(make_prompts(4))
    first = start_lineage(client)
    with Redis.from_url(redis.url) as store:
        store.hset(KEYS.run, mapping={"step": 100, "checkpoint": f"{first.lineage}-100"})
        second = client.new_lineage(LineageRequest(trainer_id="t", parent=f"{first.lineage}-100"))
        version = PolicyVersion(second.lineage, 100)
        client.push([encode_rollout(make_rollout(version=version)) for _ in range(5)])
        store.hset(KEYS.run, "lineage", b"\xff")
        until("noticed", lambda: b"lineage" in readiness(client.base_url)[1])
        # the bounds are enforced after every push, and nobody knows how old a rollout is
        with pytest.raises(UnavailableError, match="the field lineage of tba:test:run in Redis cannot be read"):
            server.client(retry_s=0.0).push([encode_rollout(make_rollout(version=version))])
        store.hset(KEYS.run, "lineage", second.lineage)
        until("ready", lambda: readiness(client.base_url)[0] == 200)
        assert client.stats().num_rollouts == 6
