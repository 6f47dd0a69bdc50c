"""Damaged counts and lineages evict nothing, `/readyz` says why leases are refused, and the audit stays whole."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from tba_buffer.storage.keys import Keys

from tba.api import LineageRequest, RunCommand
from tba.versions import PolicyVersion
from tba.wire import encode_rollout
from tests.support.buffer import make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.buffer_reads import ask
from tests.support.redis_process import RedisProcess
from tests.support.waits import until

KEYS = Keys("test")
COUNTS = [("counters", name) for name in ("drawn", "void", "inflight", "marks", "scored_total", "scored_at_mark")]
BARE = [("run", "rollbacks"), ("run", "checkpoints_kept"), ("run", "changes_lost"), ("run", "losses_accepted")]


def readiness(url: str) -> tuple[int, bytes]:
    return ask(url, "/readyz")


@pytest.mark.parametrize(
    ("key", "field"), [*COUNTS, ("run", "step"), ("run", "latest_version"), ("run", "retries"), ("run", "rollback")]
)
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


@pytest.mark.parametrize(("key", "field"), BARE)
def test_what_is_only_shown_leaves_the_service_ready(
    serve_buffer: ServeBuffer, redis: RedisProcess, key: str, field: str
) -> None:
    client = serve_buffer().client()
    with Redis.from_url(redis.url) as store:
        store.hset(getattr(KEYS, key), field, b"\xff")
    found = client.run().damaged
    assert found is not None
    assert field in {item.name for item in found.items}
    assert readiness(client.base_url)[0] == 200


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
        client.push([encode_rollout(make_rollout(version=version))])  # the bounds are enforced after every push
        assert client.stats().num_rollouts == 6
        store.hset(KEYS.run, "lineage", second.lineage)
        until("ready", lambda: readiness(client.base_url)[0] == 200)
        server.stop()
        store.hset(KEYS.lineages, second.lineage, b"\xff")
        again = serve_buffer(buffer=settings).client()
        assert again.stats().num_rollouts == 6
        assert f"lineage {second.lineage}".encode() in readiness(again.base_url)[1]


@pytest.mark.parametrize(("field", "value"), [("state", b"bogus"), ("step", b"many"), ("lineage", b"\xff")])
def test_a_line_of_the_audit_that_is_written_over_damage_can_be_read(
    serve_buffer: ServeBuffer, redis: RedisProcess, field: str, value: bytes
) -> None:
    client = serve_buffer().client()
    start_lineage(client)
    with Redis.from_url(redis.url) as store:
        whole = store.hget(KEYS.run, field)
        store.hset(KEYS.run, field, value)
        client.retry_versions(RunCommand(reason="look again"))
        store.hset(KEYS.run, field, whole or b"running")  # pyright: ignore[reportArgumentType]
    assert [(line.command, line.reason) for line in client.run_changes().changes] == [("retry-versions", "look again")]


def test_a_damaged_piece_of_the_run_is_noted_however_many_items_are(
    serve_buffer: ServeBuffer, redis: RedisProcess
) -> None:
    client = serve_buffer().client()
    with Redis.from_url(redis.url) as store:
        store.hset(KEYS.prompts, mapping={f"bad-{at}": b"\xff" for at in range(1100)})
        again = serve_buffer().client()
        store.hset(KEYS.run, "state", b"\xff")
    assert client.base_url != again.base_url
    until("not ready", lambda: b"state" in readiness(again.base_url)[1])
