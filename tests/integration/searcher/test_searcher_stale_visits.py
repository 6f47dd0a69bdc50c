"""Requests in flight that have become too old are aborted, and their visits are drawn again, also after a kill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tba_searcher.engines.engine import Completion
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tba_searcher.generation.visits import LeaseManager

from tba.api import VersionRequest
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.leases import lease
from tests.support.reward_server import RewardServer
from tests.support.searcher_loop import LoopWorld, start_loop_world
from tests.support.searcher_world import publish_version
from tests.support.tiny_model import make_tiny_model
from tests.support.waits import until

V8 = PolicyVersion(1, 8)


class Slow(EmbeddedEngine):
    """Until it has weights of the trainer, a response takes longer than they need to come."""

    def step(self) -> list[Completion]:
        time.sleep(0.3 if self.version.lineage == 0 else 0)
        return super().step()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def make_world(
    tmp_path: Path, serve_buffer: ServeBuffer, reward: RewardServer, model: Path
) -> Callable[..., LoopWorld]:
    def make(**buffer: Any) -> LoopWorld:
        searcher = {"abort_stale_requests": True, "tasks": {"addition": {"min_response_tokens": 12}}}
        limits = {"max_policy_age_steps": 4, **buffer}
        return start_loop_world(
            tmp_path, serve_buffer, reward, model, engine_class=Slow, buffer=limits, searcher=searcher
        )

    return make


async def until_stale(world: LoopWorld, tmp_path: Path, model: Path) -> None:
    """Publish a version 8 steps ahead of what the engine is decoding with; return when that was aborted."""
    await asyncio.to_thread(until, "it decodes", lambda: world.status.num_active == 4)
    publish_version(WeightVersions(FileStore(tmp_path / "store"), world.status.run), model, V8)
    world.client.announce_version(VersionRequest(version=str(V8), token=world.lineage.token))
    await asyncio.to_thread(until, "stale requests", lambda: world.status.counts["stale_requests"] > 0)


async def test_stale_requests_are_aborted_and_their_visits_drawn_again(
    make_world: Callable[..., LoopWorld], tmp_path: Path, model: Path
) -> None:
    world = make_world()
    task = asyncio.create_task(world.loop.run())
    await until_stale(world, tmp_path, model)
    await asyncio.to_thread(until, "their leases are back", lambda: world.client.stats().leases["returned"] > 0)
    await asyncio.to_thread(until, "all prompts", lambda: world.client.stats().num_prompts_seen == 8)
    world.stop.set()
    await task
    stats = world.client.stats()
    # each of the four active requests had at least one of its twelve tokens
    assert 4 <= world.status.counts["lost_tokens_stale"] <= 4 * 12
    assert world.status.heartbeat().gauges["stale_requests"] >= 4
    assert stats.leases["open"] == 0
    assert stats.leases.get("expired", 0) == 0
    assert stats.evicted == {}  # nothing that came was too old


async def test_the_visits_of_a_searcher_that_is_killed_before_the_return_come_back_by_their_deadline(
    make_world: Callable[..., LoopWorld], tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(manager: LeaseManager) -> None: ...

    monkeypatch.setattr(LeaseManager, "return_pushed", never)
    world = make_world(lease_s=3.0)
    task = asyncio.create_task(world.loop.run())
    await until_stale(world, tmp_path, model)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    def come_back() -> bool:
        return len({item.prompt.prompt_id for item in lease(world.client, 64).leases}) == 8

    assert world.client.stats().leases.get("returned", 0) == 0
    await asyncio.to_thread(until, "all prompts are leased again", come_back)
