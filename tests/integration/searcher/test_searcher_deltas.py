"""A searcher that follows the trainer by deltas while it generates: damage and refusals in between."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tba_searcher.engines.engine import Completion
from tba_searcher.engines.torch.engine import EmbeddedEngine

from tba.api import VersionRequest
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import DeltaSettings, LocalVersion, WeightVersions
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.reward_server import RewardServer
from tests.support.searcher_loop import start_loop_world
from tests.support.searcher_world import publish_version
from tests.support.tiny_model import make_tiny_model
from tests.support.waits import until
from tests.support.weight_chain import flip

DAMAGED, SPOILT, LAST = 4, 6, 10
"""Steps of the versions whose delta is damaged (it is stored whole as well), and whose canary is wrong."""


class CountsSpans(EmbeddedEngine):
    """Counts the completions that more than one version has sampled; slow, so that swaps fall within them."""

    num_mixed = 0

    def step(self) -> list[Completion]:
        time.sleep(0.01)
        completions = super().step()
        self.num_mixed += sum(len(completion.version_spans) > 1 for completion in completions)
        return completions


async def test_ten_versions_by_deltas_with_requests_in_flight_one_damaged_and_one_refused(
    tmp_path: Path, serve_buffer: ServeBuffer, reward: RewardServer
) -> None:
    model = make_tiny_model(tmp_path / "model", tied=True)
    world = start_loop_world(tmp_path, serve_buffer, reward, model, engine_class=CountsSpans, dtype="bfloat16")
    store = FileStore(tmp_path / "store")
    versions = WeightVersions(store, world.status.run)
    base = LocalVersion(START, (model / "published-0-0" / "model.safetensors",), versions.manifest(START))
    task, counts = asyncio.create_task(world.loop.run()), world.status.counts
    await asyncio.to_thread(until, "rollouts", lambda: task.done() or world.client.stats().num_scored >= 8)
    for step in range(1, LAST + 1):
        version = PolicyVersion(1, step)
        base = publish_version(
            versions, model, version, parent=base.version, dtype="bfloat16", base=base,
            canary_shift=1.0 if step == SPOILT else 0.0, deltas=DeltaSettings(keyframe_interval=4),
        )  # fmt: skip
        assert base.manifest.delta is not None
        assert base.manifest.is_full == (step % 4 == 0)
        if step == DAMAGED:
            flip(store, base.manifest.delta.objects[0].key)
        world.client.announce_version(VersionRequest(version=str(version), token=world.lineage.token))
        await asyncio.to_thread(
            until, f"version {version}",
            lambda version=version, step=step: task.done()
            or (counts["refused_versions"] if step == SPOILT else world.status.version == version),
        )  # fmt: skip
    world.stop.set()
    await task
    assert (world.status.version, counts["refused_versions"]) == (PolicyVersion(1, LAST), 1)
    assert (counts["weight_downloads_delta"], counts["weight_downloads_full"]) == (LAST - 1, 1)
    assert counts["weight_routes_failed"] == 1
    assert counts["weight_downloads_delta"] + 1 == counts["weight_loads"] + counts["refused_versions"]
    full_bytes = base.manifest.full_bytes
    assert full_bytes < counts["weight_download_bytes"] < full_bytes + (LAST - 1) * full_bytes / 2
    assert isinstance(world.engine, CountsSpans)
    assert world.engine.num_mixed > 0
    assert world.client.stats().num_rollouts == counts["rollouts_generated"]
