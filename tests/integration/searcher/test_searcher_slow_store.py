"""A searcher and a store that is slow, silent or half broken: it generates with the version it has, and says why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tba_searcher.generation import version_pulls

from tba.api import VersionRequest
from tba.config.sections import StoreSection
from tba.store import open_store
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.reward_server import RewardServer
from tests.support.s3_server import FaultyProxy, s3_with_bucket
from tests.support.searcher_loop import start_loop_world
from tests.support.searcher_world import publish_version
from tests.support.waits import until


async def test_the_version_before_is_used_under_a_named_wait_until_the_store_is_well(
    tmp_path: Path, serve_buffer: ServeBuffer, reward: RewardServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_pulls, "SLOW_DOWNLOAD_S", 0.3)
    monkeypatch.setattr(FaultyProxy, "STALL_S", 2.0)
    with s3_with_bucket(tmp_path / "s3", "slow") as server, FaultyProxy(server.port) as proxy:
        section = StoreSection(url="s3://slow", endpoint_url=server.url)
        patient = open_store(section)  # before the loop runs nobody waits for a store that failed
        hasty = open_store(section.model_copy(update={"endpoint_url": proxy.url}), timeout_s=1.2)
        world = start_loop_world(tmp_path, serve_buffer, reward, model, store=hasty, start_store=patient)
        versions = WeightVersions(patient, world.status.run)
        task, counts = asyncio.create_task(world.loop.run()), world.status.counts

        def waits() -> bool:
            wait = world.status.waits.current()
            return task.done() or (wait is not None and wait.name == "object-store")

        faults = ["stall", "cut", "trickle"]
        for step, fault in enumerate(faults, start=1):
            version, before, num_seen = PolicyVersion(1, step), world.engine.version, proxy.counts[fault]
            publish_version(versions, model, version)
            proxy.faults, proxy.TRICKLE_S = list[int | str | None]([fault] * 10_000), 30.0
            world.client.announce_version(VersionRequest(version=str(version), token=world.lineage.token))
            await asyncio.to_thread(until, f"the wait ({fault})", waits)
            num_made = counts["rollouts_generated"]
            await asyncio.to_thread(until, "rollouts", lambda num=num_made: counts["rollouts_generated"] > num)
            assert world.engine.version == before
            assert proxy.counts[fault] > num_seen
            proxy.faults, proxy.TRICKLE_S = [], 0.0
            loaded = lambda version=version: task.done() or world.status.version == version  # noqa: E731
            await asyncio.to_thread(until, f"version {version} ({fault})", loaded)
            assert not waits()
        version = PolicyVersion(1, 9)
        publish_version(versions, model, version)
        proxy.faults = [None, None, 503, None, None, "cut"] * 1000
        world.client.announce_version(VersionRequest(version=str(version), token=world.lineage.token))
        await asyncio.to_thread(until, "a version", lambda: task.done() or world.status.version == version)
        world.stop.set()
        await task
    assert world.status.counts["refused_versions"] == world.status.counts["weight_routes_failed"] == 0
    assert world.status.counts["weight_downloads_full"] == world.status.counts["weight_loads"] == 4
