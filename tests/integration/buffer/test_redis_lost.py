"""A Redis that has lost what was acknowledged: started again over an older copy of its folder, or over none.

A replica that lagged, or a restored disk, does this.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis import Redis
from tba_buffer.service import Buffer, check_redis
from tba_buffer.storage.keys import FORMAT_TEXT

from tba.api import ACKNOWLEDGED_HEADER, RunCommand
from tba.errors import ConfigError, ConflictError, UnavailableError
from tba.wire import encode_heartbeat
from tba_cli.main import main as tba
from tests.support.buffer import make_heartbeat
from tests.support.buffer_fixtures import BufferThread
from tests.support.metrics import values
from tests.support.redis_process import start_redis
from tests.support.redis_world import RedisWorld

LOST = "acknowledged changes are missing"


class World(RedisWorld):
    """Three acknowledged pushes, and a copy of the folder of Redis from then."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        super().__init__(start_redis(folder / "redis"), num_pushes=3, **sections)
        self.copies = folder / "copies"
        self.heard = ""
        """The last answer that the trainer got."""
        self.copy("older")

    def copy(self, name: str) -> None:
        """Keep what the folder of Redis has now."""
        shutil.copytree(self.redis.folder, self.copies / name)

    def restart_over(self, name: str | None) -> None:
        """Redis ends, its folder becomes the copy (None: empty), and it starts again."""
        self.redis.kill()
        shutil.rmtree(self.redis.folder)
        if name is not None:
            shutil.copytree(self.copies / name, self.redis.folder)
        self.redis.start()

    def refused(self, text: str) -> None:
        """Check that pushes are refused for this reason, the service is not ready, and every reader sees it."""
        super().refused(text)
        assert text in str(self.client.run().loss)
        assert metric(self.buffer.url, "tba_redis_lost_data") == 1
        assert metric(self.buffer.url, "tba_redis_durable") == 0

    def accepted(self) -> None:
        """Check that pushes are acknowledged again, and no reader sees a loss."""
        super().accepted()
        assert self.client.run().loss is None
        assert metric(self.buffer.url, "tba_redis_lost_data") == 0


@pytest.fixture
def without_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to the other requests to notice a loss."""
    monkeypatch.setattr("tba_buffer.service.UPKEEP_S", 3600.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.stop()


def metric(url: str, name: str) -> float:
    return values(url, name)[()]


def beat(world: World) -> None:
    """Send a heartbeat of a trainer; the trainer stays when the buffer ends."""
    world.client._acknowledged = world.heard
    world.client.heartbeat(make_heartbeat("trainer-one", "trainer"))
    world.heard = world.client._acknowledged


def test_five_lost_pushes_are_refused_until_an_operator_accepts_the_loss(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.push(5)
    world.restart_over("older")
    world.refused("lost data of this run: 5 acknowledged changes")
    before = world.client.stats().num_rollouts
    assert before == 12, "nothing was stored meanwhile"

    reason = 'the "disk" is \\ gone, é'
    for _ in range(2):
        assert tba(["buffer", "accept-loss", "--url", world.buffer.url, "--reason", reason]) == 0
    assert "accepted: Redis has lost data of this run: 5 acknowledged changes" in capsys.readouterr().out
    world.accepted()
    info = world.client.run()
    assert (info.num_lost_changes, info.state) == (5, "running")
    (change,) = world.client.run_changes().changes
    assert (change.command, change.role, change.reason) == ("accept-loss", "operator", reason)
    assert (change.old, change.new, change.num_lost) == ("running", "running", 5)
    assert metric(world.buffer.url, "tba_redis_lost_changes_total") == 5
    assert metric(world.buffer.url, "tba_redis_losses_accepted_total") == 1
    world.start_buffer()  # and a buffer that starts over it finds no loss
    world.accepted()


@pytest.mark.parametrize("first", ["older", None], ids=["an older copy", "an empty folder"])
def test_a_redis_that_comes_back_whole_is_accepted_by_the_same_buffer(world: World, first: str | None) -> None:
    world.push()
    world.redis.kill()
    world.copy("whole")
    world.redis.start()
    world.restart_over(first)
    world.refused(LOST)
    num_read = 12 if first else 0  # reading continues, and what was read is forgotten
    assert world.client.stats().num_rollouts == num_read
    world.restart_over("whole")
    world.accepted()
    assert world.outcomes_again() == {"duplicate"}
    assert world.client.run().num_lost_changes == 0


def test_a_loss_that_no_rollout_shows_is_noticed_too(world: World) -> None:
    """A pause, which is in no log."""
    world.client.command("pause", RunCommand())
    world.restart_over("older")
    world.refused(LOST)


@pytest.mark.usefixtures("without_upkeep")
def test_a_redis_that_is_emptied_while_it_runs_is_noticed_by_the_push(world: World) -> None:
    with Redis.from_url(world.redis.url) as admin:
        admin.flushall()
        assert LOST in str(world.why_refused())
        assert admin.exists("tba:test:payloads") == 0
        assert admin.hget("tba:test:counters", "acknowledged") is not None  # it was counted behind the push
    world.refused(LOST)
    world.start_buffer()
    world.refused(LOST)


def test_what_is_refused_over_an_emptied_redis_begins_no_run_in_it(world: World) -> None:
    world.restart_over(None)
    world.refused(LOST)
    with pytest.raises(ConflictError):
        world.client.heartbeat(make_heartbeat("searcher-one", "searcher", run="another"))
    with Redis.from_url(world.redis.url) as admin:
        assert admin.exists("tba:test:counters") == 0
    world.start_buffer()


def test_a_buffer_that_was_started_again_over_an_older_copy_hears_of_it_from_the_trainer(world: World) -> None:
    world.push(2)
    beat(world)
    world.restart_over("older")
    world.start_buffer()
    world.push(4)  # more than was lost: Redis counts at least as many as the trainer knows
    beat(world)
    world.refused("lost data of this run: 2 acknowledged changes")
    world.start_buffer()  # the trainer's knowledge survives the restart
    beat(world)
    world.refused(LOST)
    world.client.command("accept-loss", RunCommand(reason="x"))
    world.accepted()
    beat(world)
    world.accepted()


def test_a_claim_that_is_made_again_is_no_new_loss(world: World) -> None:
    """The answer to the heartbeat that made it was lost, or another trainer got the same."""
    world.push(5)
    beat(world)
    said = world.heard
    world.restart_over("older")
    world.start_buffer()
    world.heard = said
    beat(world)
    world.refused("lost data of this run: 5 acknowledged changes")
    world.client.command("accept-loss", RunCommand(reason="x"))
    world.accepted()
    world.heard = said
    beat(world)
    world.accepted()
    assert world.client.run().num_lost_changes == 5


def test_a_loss_is_found_again_by_a_buffer_over_a_redis_that_was_restored_once_more(world: World) -> None:
    """The note of the loss went with it, and what the trainer said then was all that was left."""
    world.push(5)
    beat(world)
    for _ in range(2):
        world.restart_over("older")
        world.start_buffer()
        for _ in range(2):
            beat(world)
        world.refused("lost data of this run: 5 acknowledged changes")
    world.client.command("accept-loss", RunCommand(reason="x"))
    world.accepted()
    world.start_buffer()  # before the trainer knows of the acceptance
    beat(world)
    world.accepted()


def test_what_a_searcher_or_nobody_or_the_trainer_of_another_run_says_stops_nothing(world: World) -> None:
    claim = {ACKNOWLEDGED_HEADER: f"{'0' * 16}:999999"}
    world.client._call(
        "POST", "/v1/heartbeats", msgpack=encode_heartbeat(make_heartbeat("searcher-one", "searcher")), headers=claim
    )
    body = encode_heartbeat(make_heartbeat("trainer-one", "trainer", run="another"))
    with pytest.raises(ConflictError):
        world.client._call("POST", "/v1/heartbeats", msgpack=body, headers=claim)
    for text in ("", "x", "0:1", f"{'0' * 16}:{2**60}", f"{'0' * 16}:-1"):
        world.heard = text
        beat(world)
    world.push()
    assert world.client.run().loss is None


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, r"another release \(tba 0\.1\) in storage format 1; this one"),
        ("9 0.9.0", r"another release \(tba 0\.9\.0\) in storage format 9; this one"),
    ],
)
def test_a_run_in_another_storage_format_is_refused_in_a_sentence(world: World, found: str | None, says: str) -> None:
    with Redis.from_url(world.redis.url, decode_responses=True) as admin:
        assert admin.get("tba:test:format") == FORMAT_TEXT
        starts = admin.get("tba:test:replica")
        admin.delete("tba:test:format")
        if found is not None:
            admin.set("tba:test:format", found)
        with pytest.raises(ConfigError, match=says) as refused:
            check_redis(world.recipe)
        assert "resume it with that release" in str(refused.value)
        assert (admin.get("tba:test:format"), admin.get("tba:test:replica")) == (found, starts)


def test_what_an_older_buffer_counts_beside_a_newer_one_is_no_loss(world: World) -> None:
    """A node that came back: its buffer answers trainers until it finds the newer one."""
    world.buffers.append(BufferThread(world.recipe))
    for number in range(3):
        world.client.command("pause" if number % 2 == 0 else "resume", RunCommand())
        assert world.why_refused() is not None
    beat(world)
    world.client = world.buffer.client()
    beat(world)
    assert world.client.run().loss is None
    assert world.why_refused() is None


async def test_a_start_over_a_loss_that_nobody_accepted_is_never_ready(world: World) -> None:
    """A client that sees a ready buffer begins to write, and would be refused a moment later."""
    world.buffer.stop()
    buffer = Buffer(world.recipe, CollectorRegistry())
    await buffer.context.redis.hset("tba:test:run", "changes_missing", 5)
    await buffer.start()
    try:
        assert LOST in str(await buffer.ready())
    finally:
        await buffer.stop()


async def test_what_is_whole_again_is_read_again_also_if_that_fails_once(world: World, monkeypatch: Any) -> None:
    buffer = Buffer(world.recipe, CollectorRegistry())
    await buffer.start()
    redis, durability, tries = buffer.context.redis, buffer.context.durability, list[str]()
    reread = buffer.view.reread

    async def fails_once() -> None:
        tries.append("")
        if len(tries) == 1:
            raise UnavailableError("Redis does not answer")
        await reread()

    try:
        number = await redis.hget("tba:test:counters", "acknowledged")
        await redis.hset("tba:test:counters", "acknowledged", 1)
        await durability.check()
        assert LOST in str(durability.broken)
        monkeypatch.setattr(buffer.view, "reread", fails_once)
        await redis.hset("tba:test:counters", "acknowledged", number)
        until_s = time.monotonic() + 30
        while durability.broken is not None and time.monotonic() < until_s:
            with suppress(UnavailableError):
                await durability.check()
        assert (durability.broken, len(tries)) == (None, 2)
    finally:
        await buffer.stop()


async def test_what_is_acknowledged_while_redis_is_asked_is_no_loss(world: World, monkeypatch: Any) -> None:
    buffer = Buffer(world.recipe, CollectorRegistry())
    await buffer.start()
    losses = buffer.context.losses
    read = losses._read

    async def read_while_a_push_is_answered() -> Any:
        found = await read()
        await losses.acknowledge(losses.acknowledged + 1, losses.acknowledged, epoch=0)
        return found

    monkeypatch.setattr(losses, "_read", read_while_a_push_is_answered)
    try:
        assert await losses.check() is None
    finally:
        await buffer.stop()
