"""A searcher that is stopped returns every lease that it can, also those that are granted meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tba_searcher.service import Clients, Searcher

from tba.api import LeaseReply, LeaseRequest, LeaseReturn
from tba.clients import BufferClient, RewardClient
from tba.config import parse_recipe
from tba.errors import UnavailableError
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.reward_server import RewardServer
from tests.support.searcher_loop import LoopWorld, start_loop_world
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import DEADLINE_S, until

MakeWorld = Callable[..., LoopWorld]


class HeldBuffer(BufferClient):
    """Grants leases, but holds back the replies until `answers` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.granted, self.answers = threading.Event(), threading.Event()
        self.is_away = False
        """The next call for leases fails."""
        self.num_asked = self.num_failing_returns = 0

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Claim visits, and hold the answer."""
        self.num_asked += 1
        reply = super().lease(request)
        self.granted.set()
        self.answers.wait(DEADLINE_S)
        if self.is_away:
            raise UnavailableError("no answer")
        return reply

    def return_leases(self, request: LeaseReturn) -> None:
        """Give leases back, after so many that are lost on the way."""
        if self.num_failing_returns:
            self.num_failing_returns -= 1
            raise UnavailableError("no answer")
        super().return_leases(request)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def make_world(tmp_path: Path, serve_buffer: ServeBuffer, model: Path) -> Iterator[MakeWorld]:
    reward = RewardServer()

    def make(**searcher: Any) -> LoopWorld:
        return start_loop_world(tmp_path, serve_buffer, reward, model, searcher=searcher)

    yield make
    reward.stop()


def held(world: LoopWorld) -> HeldBuffer:
    """The buffer as the loop sees it from now on."""
    buffer = HeldBuffer(world.served.url)
    world.loop._buffer = world.loop._leases._buffer = buffer
    return buffer


async def stopped_while_leases_are_granted(world: LoopWorld, buffer: HeldBuffer) -> asyncio.Task[None]:
    """The loop, which drains; the buffer has granted leases of which the searcher does not know yet."""
    task = asyncio.create_task(world.loop.run())
    await asyncio.to_thread(until, "leases", buffer.granted.is_set)
    assert world.client.stats().leases["open"] > 0
    world.stop.set()
    await asyncio.to_thread(until, "the drain", lambda: world.status.state != "running")
    await asyncio.wait({task}, timeout=0.5)  # one that did not wait for the answer would end now
    return task


async def test_leases_that_are_granted_while_it_drains_go_back(make_world: MakeWorld) -> None:
    world = make_world(drain_s=DEADLINE_S)
    buffer = held(world)
    task = await stopped_while_leases_are_granted(world, buffer)
    buffer.answers.set()
    await task
    stats = world.client.stats()
    assert stats.leases["open"] == 0
    assert stats.leases["returned"] == stats.leases["granted"] == world.status.counts["leases_returned"] > 0


async def test_a_drain_waits_for_an_answer_only_so_long_and_the_leases_expire(
    make_world: MakeWorld, capfd: pytest.CaptureFixture[str]
) -> None:
    world = make_world(drain_s=0.5)
    buffer = held(world)
    await (await stopped_while_leases_are_granted(world, buffer))
    buffer.answers.set()
    assert world.client.stats().leases["open"] > 0
    assert "lease request not answered; leases that it was granted expire" in capfd.readouterr().out


async def test_a_request_that_fails_while_it_drains_is_not_made_again(make_world: MakeWorld) -> None:
    world = make_world(drain_s=DEADLINE_S)
    buffer = held(world)
    task = await stopped_while_leases_are_granted(world, buffer)
    buffer.is_away = True
    buffer.answers.set()
    await task
    assert (world.status.state, buffer.num_asked) == ("ended", 1)


async def test_a_return_that_fails_at_the_start_of_a_drain_is_made_again_at_its_end(make_world: MakeWorld) -> None:
    world = make_world(drain_s=DEADLINE_S)
    buffer = held(world)
    buffer.answers.set()
    world.loop._next_requests = list  # what is leased is not begun
    task = asyncio.create_task(world.loop.run())
    await asyncio.to_thread(until, "leases", lambda: world.loop._queue.open_visits())
    buffer.num_failing_returns = 1
    world.stop.set()
    await task
    stats = world.client.stats()
    assert stats.leases["open"] == 0
    assert stats.leases["returned"] == stats.leases["granted"] > 0


async def test_a_searcher_that_is_stopped_while_it_starts_returns_what_it_is_granted(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    world = make_world()
    document = world.served.recipe.model_dump(mode="json")
    document["store"]["url"] = f"file://{tmp_path / 'store'}"
    document["searcher"]["drain_s"] = DEADLINE_S
    buffer, stop = HeldBuffer(world.served.url), asyncio.Event()
    searcher = Searcher(
        parse_recipe(document, where="test"),
        tmp_path / "searcher",
        searcher_id="s",
        clients=Clients(buffer=buffer, heartbeats=world.client, reward=RewardClient("http://127.0.0.1:1", retry_s=0)),
        stop=stop,
    )
    task = asyncio.create_task(searcher.run())
    await asyncio.to_thread(until, "a lease", buffer.granted.is_set)
    assert world.client.stats().leases["open"] == 1
    stop.set()
    await asyncio.wait({task}, timeout=0.5)  # one that did not wait for the answer would end now
    buffer.answers.set()
    await task
    stats = world.client.stats()
    assert (stats.leases["open"], stats.leases["returned"]) == (0, 1)
