"""Redis must keep what the buffer acknowledges: nothing is acknowledged while it does not, and all is well again
by itself once it does."""

from __future__ import annotations

import json
import resource
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis as Client
from tba_buffer.storage.durability import DurabilityCheck

from tba.api import LeaseRequest, VersionRequest
from tba.config.redis import RedisAccess
from tba.errors import ConfigError, UnavailableError
from tests.support import redis_process
from tests.support.buffer import make_payloads, start_lineage
from tests.support.buffer_fixtures import BufferThread
from tests.support.buffer_reads import readyz
from tests.support.redis_process import DURABLE, RedisProcess, free_port, redis_server_path, start_redis
from tests.support.redis_world import RedisWorld
from tests.support.waits import until

EVERYSEC = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "redis")
    yield made
    made.stop()


class World(RedisWorld):
    """Its Redis can be administrated."""

    def __init__(self, folder: Path) -> None:
        super().__init__(start_redis(folder))
        self.admin: Client = Client.from_url(self.redis.url)

    def stop(self) -> None:
        self.admin.close()
        super().stop()


def fill(admin: Client) -> None:
    for i in range(200):
        admin.set(f"key-{i}", b"x" * 10_000)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        *(("appendfsync", "everysec", "always"), ("appendonly", "no", "yes")),
        *((name, "yes", "no") for name in ("no-appendfsync-on-rewrite", "aof-load-truncated")),
    ],
)
def test_a_setting_that_is_not_durable_stops_every_write_until_it_is_fixed(
    world: World, name: str, bad: str, good: str
) -> None:
    says = f"{name} {bad}"
    world.admin.config_set(name, bad)
    world.refused(says)
    with pytest.raises(UnavailableError, match=says):
        world.client.announce_version(VersionRequest(version="0-0", token=world.token))
    with pytest.raises(UnavailableError, match=says):
        world.client.lease(LeaseRequest(searcher_id="s", max_leases=1))
    assert world.client.run().state == "running"  # reading continues
    world.admin.config_set(name, good)
    world.accepted()
    assert world.admin.info("persistence")["aof_rewrite_in_progress"] == 0  # the file is whole


def test_a_redis_that_drops_keys_when_it_is_full_is_refused(world: World) -> None:
    world.admin.config_set("maxmemory-policy", "allkeys-lru")
    world.admin.config_set("maxmemory", "1gb")
    world.refused("maxmemory-policy allkeys-lru")
    world.admin.config_set("maxmemory-policy", "noeviction")
    world.accepted()


def test_a_nearly_full_redis_takes_no_rollouts_but_everything_else_continues(world: World) -> None:
    # so that what is left is more than Redis' own ups and downs; made in place: a sent one would stand in buffers too
    world.admin.setrange("another's", 64 * 1024**2, b"x")
    world.admin.config_set("maxmemory", int(world.admin.info("memory")["used_memory"] / 0.96))
    world.refused("Redis is full")
    stored = world.client.stats().num_rollouts
    world.client.announce_version(VersionRequest(version="0-0", token=world.token))
    assert world.client.lease(LeaseRequest(searcher_id="s", max_leases=1)).leases
    assert world.client.stats().num_rollouts == stored
    world.admin.config_set("maxmemory", 0)
    world.accepted()


def test_maxmemory_reached_is_a_clear_state_and_ends_by_itself(world: World) -> None:
    world.admin.config_set("maxmemory", "100kb")
    world.refused("OOM")
    with pytest.raises(UnavailableError, match="OOM"):
        start_lineage(world.client)
    assert world.client.run().state == "running"
    world.admin.config_set("maxmemory", 0)
    world.accepted()


def test_a_replica_is_refused(world: World, tmp_path: Path) -> None:
    primary = start_redis(tmp_path / "primary")
    try:
        world.admin.config_set("replica-read-only", "no")  # it would even take the writes, and forget them
        world.admin.replicaof("127.0.0.1", str(primary.port))
        world.refused(f"a replica of 127.0.0.1:{primary.port}")
    finally:
        primary.stop()


def test_a_refusal_says_when_to_come_back(world: World) -> None:
    world.admin.config_set("appendfsync", "no")
    world.refused("appendfsync no")
    request = urllib.request.Request(world.buffer.url + "/v1/leases", data=b'{"searcher_id": "s", "max_leases": 1}')
    request.add_header("content-type", "application/json")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    with caught.value as reply:
        problem = json.loads(reply.read())
    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert problem["type"] == "urn:tba:problem:unavailable"
    assert "appendfsync no" in problem["detail"]


def test_nothing_is_acknowledged_by_a_redis_that_came_back_with_another_policy(world: World) -> None:
    """At once, not only when the upkeep looks again: the first push goes over a new connection."""
    before = world.client.stats().num_rollouts
    for _ in range(5):
        world.redis.kill()
        world.redis.options = EVERYSEC
        world.redis.start()
        with pytest.raises(UnavailableError):
            world.push()
        world.redis.kill()
        world.redis.options = DURABLE
        world.redis.start()
        world.accepted()
    assert world.client.stats().num_rollouts >= before


@asynccontextmanager
async def checked(redis: RedisProcess) -> AsyncIterator[tuple[DurabilityCheck, Client]]:
    """A Redis that runs, and its checks and administrator; all end with the block."""
    async with aclosing(DurabilityCheck(RedisAccess(redis.url))) as durability:
        with Client.from_url(redis.url) as admin:
            try:
                yield durability, admin
            finally:
                redis.stop()


async def test_a_redis_in_cluster_mode_is_refused(tmp_path: Path) -> None:
    port = next(port for port in iter(free_port, None) if port < 55_000)  # its bus has a port 10,000 higher
    redis = RedisProcess(tmp_path, port, (*DURABLE, "--cluster-enabled", "yes"))
    redis.start()
    async with checked(redis) as (durability, _):
        with pytest.raises(ConfigError, match="cluster mode"):
            await durability.check_at_start()


@pytest.mark.parametrize("before", ["no", "yes"], ids=["there was none", "there was one"])
async def test_a_start_waits_until_a_file_that_was_just_turned_on_is_whole(tmp_path: Path, before: str) -> None:
    """Redis says `appendonly yes` at once, but until the first rewrite has ended nothing is in the file."""
    options = ("--appendonly", before, "--appendfsync", "always", "--save", "")
    async with checked(start_redis(tmp_path, options=options)) as (durability, admin):
        fill(admin)
        admin.config_set("appendonly", "no")
        admin.config_set("rdb-key-save-delay", 5000)  # microseconds per key: slows the rewrite down
        admin.config_set("appendonly", "yes")
        assert admin.info("persistence")["aof_rewrite_in_progress"] == 1
        await durability.check_at_start()
        assert admin.info("persistence")["aof_rewrite_in_progress"] == 0


async def test_the_first_rewrite_of_a_file_that_is_whole_refuses_nothing(tmp_path: Path) -> None:
    """It begins by itself once the file is large; neither a start nor a push waits for its end."""
    async with checked(start_redis(tmp_path)) as (durability, admin):
        if int(str(admin.info("server")["redis_version"]).split(".")[0]) >= 7:
            pytest.skip("Redis 7 does not tell it from a file that was just turned on")
        fill(admin)
        admin.config_set("rdb-key-save-delay", 300_000)
        admin.config_set("auto-aof-rewrite-min-size", "1mb")
        until("the rewrite", lambda: admin.info("persistence")["aof_rewrite_in_progress"])
        await durability.check_at_start()
        await durability.check()
        await durability.require()
        assert admin.info("persistence")["aof_rewrite_in_progress"] == 1
        assert admin.dbsize() == 200


@pytest.mark.parametrize("by_hand", [True, False])
def test_pushes_continue_while_the_file_is_rewritten(world: World, by_hand: bool) -> None:
    fill(world.admin)
    world.admin.config_set("rdb-key-save-delay", 300_000)
    if by_hand:
        world.admin.bgrewriteaof()
    else:
        world.admin.config_set("auto-aof-rewrite-min-size", "1mb")
    until("the rewrite", lambda: world.admin.info("persistence")["aof_rewrite_in_progress"])
    for _ in range(20):
        world.push()
        world.admin.connection_pool.disconnect()
    assert readyz(world.buffer.url)[0] == 200
    other = BufferThread(world.buffer.recipe)
    other.client().push(make_payloads(["train-0"]))
    other.stop()
    assert world.admin.info("persistence")["aof_rewrite_in_progress"] == 1


def limit_file_size(redis: RedisProcess, num_bytes: int) -> None:
    """No file of this Redis grows beyond it: its disk is full, as far as it can tell."""
    _, hard = resource.prlimit(redis.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(redis.process.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


@pytest.fixture
def without_sigxfsz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis gets an error from write() at the limit, as from a full disk, and not a signal."""
    wrapper = tmp_path / "redis-server"
    wrapper.write_text(f'#!/bin/sh\ntrap "" XFSZ\nexec {redis_server_path()} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(redis_process, "redis_server_path", lambda: str(wrapper))


@pytest.mark.usefixtures("without_sigxfsz")
def test_a_full_disk_under_always_ends_redis_and_loses_nothing(tmp_path: Path) -> None:
    """Redis cannot take back what it has answered, so with `always` it exits when it cannot write."""
    world = World(tmp_path / "redis")
    try:
        limit_file_size(world.redis, 40_000)
        while world.why_refused() is None:
            pass
        until("Redis has ended", lambda: world.redis.process.poll() is not None)
        assert "Redis does not answer" in str(world.why_refused())
        assert readyz(world.buffer.url)[0] == 503
        world.redis.start()
        until("a push is accepted", lambda: world.why_refused() is None)
        assert world.outcomes_again() == {"duplicate"}
    finally:
        world.stop()
