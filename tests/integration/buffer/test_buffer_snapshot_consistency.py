"""A snapshot that is written while rollouts are pushed, evicted and scored again is the state at one log position."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_buffer.index.log import Evicted, Publication, Rescored, RolloutsAdded, parse_entry
from tba_buffer.index.log_follower import Compactor
from tba_buffer.scoring.reward_service import RewardConnection
from tba_buffer.scoring.rollout_scorer import RolloutScorer, ScoredRollout
from tba_buffer.service import Buffer
from tba_buffer.snapshots import jobs
from tba_buffer.snapshots import save as saving
from tba_buffer.snapshots.save import SnapshotSave
from tba_buffer.snapshots.snapshot_format import SnapshotReader, read_manifest

from tba.api import LineageRequest, LoadRequest, VersionRequest
from tba.errors import StoreUnavailableError, UnavailableError
from tba.store import FileStore
from tba.wire import decode_rollout, encode_rollout
from tba.wire.snapshot_manifest import SnapshotSource
from tests.support.buffer import make_prompts, make_rollout
from tests.support.buffer_fixtures import StartService, without_constants

CAP = 600
SOURCE = SnapshotSource("test", "busy")


class SlowStore(FileStore):
    """A store with slow writes: other work ends first."""

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        time.sleep(0.02)
        super().put(key, data, create_only=create_only)


@pytest.fixture
async def buffer(start_service: StartService) -> Buffer:
    return await start_service(num_prompts=8, buffer={"max_rollouts": CAP})


class World:
    """Pushes and re-scores; remembers what was pushed and what every re-scoring wrote, in the order of the log."""

    def __init__(self, buffer: Buffer, seed: int) -> None:
        self.buffer, self.random = buffer, random.Random(seed)
        self.pushed: dict[bytes, bytes] = {}
        self.rescored: list[dict[int, bytes]] = []
        self.over = asyncio.Event()
        parts: Any = {"catalog": buffer.catalog, "view": buffer.view, "evictor": buffer.evictor}
        reward = RewardConnection(buffer.context, buffer.components)
        self.scorer = RolloutScorer(buffer.context, reward=reward, **parts)

    async def push(self, num: int) -> None:
        rollouts = [make_rollout(f"train-{self.random.randrange(8)}", reward=self.random.random()) for _ in range(num)]
        self.pushed |= {rollout.rollout_id: encode_rollout(rollout) for rollout in rollouts}
        await self.buffer.writer.push([self.pushed[rollout.rollout_id] for rollout in rollouts])

    async def rescore(self, num: int) -> None:
        """Half of them get another reward, the others only another version of the same length with the same reward."""
        buffer, context = self.buffer, self.buffer.context
        async with context.mutation_lock:
            index = await buffer.view.catch_up()
            rows = index.live_rows()
            rows = rows[self.random.sample(range(len(rows)), min(num, len(rows)))]
            payloads = await context.redis.hmget(context.keys.payloads, index.rollout_ids(rows))
            items = []
            for position, payload in zip(index.column("position", rows).tolist(), payloads, strict=True):
                before = decode_rollout(payload)
                reward = before.reward if self.random.random() < 0.5 else self.random.random()
                after = before.with_reward(reward or 0.0, f"addition-{self.random.randrange(9)}")
                items.append(ScoredRollout(position, before, len(payload), after, encode_rollout(after)))
            changed = [item for item, payload in zip(items, payloads, strict=True) if item.payload != payload]
            if changed:
                await self.scorer.store(changed)
                self.rescored.append({item.position: item.payload for item in changed})

    async def churn(self) -> None:
        while not self.over.is_set():
            await self.push(self.random.randrange(1, 40))
            await self.rescore(self.random.randrange(1, 20))
            await asyncio.sleep(0)

    async def live_at(self, position: int) -> dict[int, bytes]:
        """Read from the log which payloads were live there: position -> payload."""
        live: dict[int, bytes] = {}
        rescored = iter(self.rescored)
        for entry_id, fields in await self.buffer.context.redis.xrange(self.buffer.context.keys.log):
            event = parse_entry(entry_id, fields)
            last = int(entry_id.split(b"-")[0])
            if last > position:
                break
            if isinstance(event, RolloutsAdded):
                ids = [rollout_id.tobytes() for rollout_id in event.records["rollout_id"]]
                live |= {event.first_position + at: self.pushed[rollout_id] for at, rollout_id in enumerate(ids)}
            elif isinstance(event, Evicted):
                for gone in event.positions.tolist():
                    live.pop(gone, None)
            elif isinstance(event, Rescored):
                live |= {at: payload for at, payload in next(rescored).items() if at in live}
            else:
                assert isinstance(event, Publication)
        return live


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_snapshot_is_what_was_live_at_its_position(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    bounds = {"OBJECT_BYTES": 20_000, "LITTLE_BYTES": 5_000, "MAX_PASSES": 4, "READ_ROLLOUTS": 32}
    without_constants(monkeypatch, bounds)
    world, store = World(buffer, seed), SlowStore(tmp_path / "store")
    await buffer.catalog.upload(make_prompts(8, 2))
    await world.push(CAP // 2)
    churning = asyncio.create_task(world.churn())
    before = (await buffer.view.catch_up()).position
    save = SnapshotSave(buffer.context, buffer.view, buffer.catalog, store, SOURCE)
    manifest = await save.run()
    world.over.set()
    await churning

    assert manifest.log_position > before
    assert sum(1 for rescored in world.rescored if rescored) > 10
    assert (await buffer.stats.read()).evicted["max_rollouts"] > 0
    assert len(manifest.rollouts) > 5
    assert save.writer.num_written > manifest.num_rollouts, "something was written for nothing, or twice"
    found, _ = await read_manifest(store, SOURCE)
    assert found == manifest
    reader = SnapshotReader(store, found)
    places = await reader.places()
    snapshot = dict(zip(places["position"].tolist(), await reader.payloads(places), strict=True))
    assert snapshot == await world.live_at(manifest.log_position)
    assert manifest.num_scored == len(snapshot)
    assert [[prompt.prompt_id for prompt in prompts] async for prompts in reader.prompts()] == [buffer.catalog.ids]


class ActingStore(FileStore):
    """Acts in the loop of the buffer before each object of rollouts is written."""

    def __init__(self, folder: Path, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(folder)
        self._act, self.num_acts, self._loop = act, 0, asyncio.get_running_loop()

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        if "rollouts" in key:
            asyncio.run_coroutine_threadsafe(self._act(), self._loop).result()
            self.num_acts += 1
        super().put(key, data, create_only=create_only)


async def push_and_evict(world: World) -> None:
    """Writing must not hold the lock that evicting needs: a push at the cap gets through."""
    async with asyncio.timeout(60), world.buffer.context.mutation_lock:  # the upkeep may have it, for a moment
        pass
    await world.push(10)


async def test_a_push_that_must_evict_does_not_wait_for_the_store(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_constants(monkeypatch, {"OBJECT_BYTES": 2_000, "MAX_PASSES": 2})
    world = World(buffer, 0)
    await world.push(CAP)
    store = ActingStore(tmp_path / "store", partial(push_and_evict, world))
    manifest = await SnapshotSave(buffer.context, buffer.view, buffer.catalog, store, SOURCE).run()
    assert store.num_acts > CAP // 10
    assert manifest.num_scored == CAP
    reader = SnapshotReader(store, manifest)
    places = await reader.places()
    snapshot = dict(zip(places["position"].tolist(), await reader.payloads(places), strict=True))
    assert snapshot == await world.live_at(manifest.log_position)


async def test_a_rest_that_does_not_fit_into_memory_fails_the_save(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_constants(monkeypatch, {"LITTLE_BYTES": 100, "HELD_BYTES": 200})
    world = World(buffer, 0)
    await world.push(50)
    store = ActingStore(tmp_path / "store", partial(push_and_evict, world))
    with pytest.raises(UnavailableError, match="rollouts arrive faster"):
        await SnapshotSave(buffer.context, buffer.view, buffer.catalog, store, SOURCE).run()
    assert store.num_acts == saving.MAX_PASSES
    assert store.size_bytes(SOURCE.manifest_key) is None


async def test_a_log_that_was_cut_meanwhile_fails_the_save(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts that were scored again are known from the log alone."""
    without_constants(monkeypatch, {"OBJECT_BYTES": 2_000})
    world = World(buffer, 0)

    async def cut() -> None:
        await world.push(30)
        await Compactor(buffer.context, min_events=0).keep_up(await buffer.view.catch_up())

    store = ActingStore(tmp_path / "store", cut)
    await world.push(20)
    with pytest.raises(UnavailableError, match="the log was cut"):
        await SnapshotSave(buffer.context, buffer.view, buffer.catalog, store, SOURCE).run()
    assert store.size_bytes(SOURCE.manifest_key) is None


async def test_another_buffer_process_makes_the_save_fail(buffer: Buffer, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    await World(buffer, 0).push(20)
    await buffer.context.redis.incr(buffer.context.keys.epoch)
    with pytest.raises(UnavailableError, match="newer buffer process"):
        await SnapshotSave(buffer.context, buffer.view, buffer.catalog, store, SOURCE).run()
    assert store.size_bytes(SOURCE.manifest_key) is None


async def test_marks_and_lineages_are_saved(buffer: Buffer, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    lineage = await buffer.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    positions = []
    for step in range(30):
        positions.append(await buffer.lineages.publish(VersionRequest(version=f"1-{step}", token=lineage.token)))
        await World(buffer, step).push(1)
    manifest = await SnapshotSave(buffer.context, buffer.view, buffer.catalog, store, SOURCE).run()
    assert [(mark.position, mark.version) for mark in manifest.marks] == [
        (position, f"1-{step}") for step, position in enumerate(positions)
    ]
    assert {number: saved.parent for number, saved in manifest.lineages.items()} == {1: "0-0"}
    assert (manifest.lineage, manifest.latest_version) == (1, "1-29")
    assert np.all(np.diff(positions) == 2)


class AwayStore(FileStore):
    """Cannot be read while it is away."""

    is_away, num_failures = True, 0

    def get(self, key: str) -> bytes:
        if self.is_away:
            self.num_failures += 1
            raise StoreUnavailableError(f"cannot read {key}: away; come back")
        return super().get(key)


async def test_a_load_waits_for_a_store_that_is_away(
    buffer: Buffer, start_service: StartService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RETRY_S", 0.01)
    await World(buffer, 0).push(50)
    await SnapshotSave(buffer.context, buffer.view, buffer.catalog, FileStore(tmp_path / "store"), SOURCE).run()
    other = await start_service(num_prompts=0, run="other")
    store = AwayStore(tmp_path / "store")
    other.snapshots._opened = store
    await other.snapshots.load(LoadRequest(source=str(SOURCE)))
    while store.num_failures < 3:
        with pytest.raises(UnavailableError, match="test/busy is being loaded"):
            await other.snapshots.check_may_train()
        await asyncio.sleep(0.01)
    store.is_away = False
    while (origin := await other.snapshots.origin()) is not None and origin.state == "loading":
        await asyncio.sleep(0.01)
    assert origin is not None
    assert (origin.state, origin.num_loaded) == ("complete", 50)
    await other.snapshots.check_may_train()
