"""Snapshots when something dies or lies: killed while saving, killed while loading, damaged objects; over S3 too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from tba.api import LineageRequest, LoadRequest
from tba.clients import BufferClient
from tba.errors import NotFoundError, UnavailableError
from tba.store import ObjectStore, open_store
from tba.wire import encode_rollout
from tba.wire.snapshot_manifest import SnapshotSource, decode_snapshot_manifest
from tests.support.buffer import (
    BufferProcess,
    Stack,
    make_prompts,
    make_recipe,
    make_rollout,
    start_buffer,
    start_stack,
    write_recipe,
)
from tests.support.redis_process import free_port
from tests.support.s3_server import S3Server, s3_with_bucket
from tests.support.waits import until

NUM_ROLLOUTS = 19_200
NUM_TRIES = 5
"""Tries to kill a process in the middle of its work: on a busy machine the kill may come too late."""
PUSH = 480


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_with_bucket(tmp_path_factory.mktemp("s3"), "weights") as server:
        yield server


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[Stack]:
    """A run with many rollouts whose store is the S3 server."""
    store = {"url": "s3://weights/some/prefix", "endpoint_url": s3_server.url}
    stack = start_stack(tmp_path_factory.mktemp("stack"), store=store)
    client = stack.client
    client.upload_prompts(make_prompts(64))
    for at in range(0, NUM_ROLLOUTS, PUSH):
        client.push([encode_rollout(make_rollout(f"train-{i % 64}", num_tokens=300)) for i in range(at, at + PUSH)])
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def store(stack: Stack) -> ObjectStore:
    return open_store(stack.recipe.store)


@pytest.fixture
def start_other(stack: Stack, tmp_path: Path) -> Iterator[Callable[[str], BufferProcess]]:
    """Call it with the name of another run to start its buffer over the same Redis and store."""
    started: list[BufferProcess] = []

    def start(run: str) -> BufferProcess:
        buffer = {"port": free_port(), "redis_url": stack.redis.url}
        recipe = make_recipe(run=run, buffer=buffer, store=stack.recipe.store.model_dump())
        started.append(start_buffer(write_recipe(tmp_path / f"{run}.json", recipe)))
        return started[-1]

    yield start
    for process in started:
        process.stop()


def wait_for_save(client: BufferClient, name: str) -> str:
    until(f"the end of saving {name}", lambda: client.get_snapshot(name).state != "saving")
    return client.get_snapshot(name).state


def test_a_buffer_killed_while_it_saves_leaves_no_snapshot_and_saves_again(stack: Stack, store: ObjectStore) -> None:
    client = stack.client
    for number in range(NUM_TRIES):
        name = f"killed-{number}"
        source = SnapshotSource("test", name)
        client.save_snapshot(name)
        until("it has begun to write", lambda source=source: store.list(source.prefix), every_s=0.001)
        stack.buffer.kill()
        left = store.list(source.prefix)
        stack.buffer.start()
        if source.manifest_key not in left:
            break
    else:
        pytest.fail(f"{NUM_TRIES} times the snapshot was complete before the kill")
    assert left
    with pytest.raises(NotFoundError, match=f"there is no snapshot test/{name}"):
        client.get_snapshot(name)
    client.save_snapshot(name)
    assert wait_for_save(client, name) == "complete"
    manifest = decode_snapshot_manifest(store.get(source.manifest_key), key=source.manifest_key)
    assert manifest.num_rollouts == NUM_ROLLOUTS
    assert store.list(source.prefix) == sorted([source.manifest_key, *(stored.key for stored in manifest.objects)])


def test_a_buffer_that_is_killed_while_it_loads_continues_where_it_was(
    stack: Stack, start_other: Callable[[str], BufferProcess]
) -> None:
    client = stack.client
    client.save_snapshot("whole")
    assert wait_for_save(client, "whole") == "complete"
    for number in range(NUM_TRIES):
        run = f"resumed-{number}"
        other = start_other(run)
        other.client().load_snapshot(LoadRequest(source="test/whole"))
        with Redis.from_url(stack.redis.url) as redis:
            begun = lambda redis=redis, run=run: int(redis.hget(f"tba:{run}:run", "origin_cursor") or 0) >= 2000  # noqa: E731
            until("a part is loaded", begun, every_s=0.001)
            other.kill()
            num_loaded = redis.hlen(f"tba:{run}:payloads")
        if num_loaded < NUM_ROLLOUTS:
            break
    else:
        pytest.fail(f"{NUM_TRIES} times everything was loaded before the kill")
    assert num_loaded > 0
    with pytest.raises(UnavailableError):
        other.client(retry_s=0).run()
    other.start()
    until("the load", lambda: (origin := other.client().run().origin) is not None and origin.state == "complete")
    with Redis.from_url(stack.redis.url) as redis:
        found, expected = (set(redis.hkeys(f"tba:{name}:payloads")) for name in (run, "test"))
    assert found == expected
    assert other.client().stats().num_scored == NUM_ROLLOUTS
    assert other.client().new_lineage(LineageRequest(trainer_id="t", parent="0-0")).lineage == 1


@pytest.mark.parametrize("kind", ["rollouts", "live", "prompts"])
def test_a_damaged_object_is_refused_before_anything_changes(
    stack: Stack, store: ObjectStore, start_other: Callable[[str], BufferProcess], kind: str
) -> None:
    client = stack.client
    client.save_snapshot(f"bad-{kind}")
    assert wait_for_save(client, f"bad-{kind}") == "complete"
    key = SnapshotSource("test", f"bad-{kind}").manifest_key
    manifest = decode_snapshot_manifest(store.get(key), key=key)
    damaged = getattr(manifest, kind)[-1]
    data = bytearray(store.get(damaged.key))
    data[len(data) // 2] ^= 1
    store.put(damaged.key, bytes(data))
    other = start_other(f"careful-{kind}").client()
    other.load_snapshot(LoadRequest(source=f"test/bad-{kind}"))
    until("the end of the load", lambda: (origin := other.run().origin) is not None and origin.state == "failed")
    origin = other.run().origin
    assert origin is not None
    assert f"{damaged.key} in {store.url} is damaged" in (origin.reason or "")
    with Redis.from_url(stack.redis.url, decode_responses=True) as redis:
        left = set(redis.keys(f"tba:careful-{kind}:*"))  # pyright: ignore[reportArgumentType]
        assert left == {f"tba:careful-{kind}:{name}" for name in ("format", "replica")}
    assert other.stats().num_prompts_train == 0
