"""`searcher.on_run_end = "wait"`: a searcher outlives its run without the model, and continues when the run does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tba.api import RunCommand, VersionRequest
from tba.versions import PolicyVersion
from tests.support.buffer import start_lineage
from tests.support.searcher_world import World, publish_version, sigterm, start_world
from tests.support.tiny_model import make_tiny_model


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    model = make_tiny_model(tmp_path / "model", 0, tied=True)
    world = start_world(tmp_path, model, searcher={"on_run_end": "wait", "retry_s": 20.0})
    yield world
    world.stop()


def test_a_searcher_waits_without_a_model_until_the_run_goes_on_and_drains_in_the_end(
    world: World, tmp_path: Path
) -> None:
    world.start_reward()
    process = world.start_searcher()
    world.until(lambda: world.client.stats().num_scored >= 8, "scored rollouts")
    world.client.command("done", RunCommand(token=world.lineage.token))

    world.until(lambda: (s := world.searcher()) is not None and s.state == "idle", "the idle searcher")
    world.until(lambda: [w.name for w in world.client.run().waits] == ["run-done"], "its wait")
    assert (s := world.searcher()) is not None
    assert (s.version, s.gauges["active_slots"]) == (None, 0)
    searchers = world.client.run().searchers
    assert searchers is not None
    assert searchers.alive == 1
    assert process.poll() is None

    num_before = world.client.stats().num_rollouts
    lineage = start_lineage(world.client, mark=False)
    publish_version(world.versions, tmp_path / "model", PolicyVersion(lineage.lineage, 4))
    world.client.announce_version(VersionRequest(version=f"{lineage.lineage}-4", token=lineage.token))
    world.until(lambda: world.client.stats().num_rollouts >= num_before + 8, "rollouts of the resumed run")
    assert (s := world.searcher()) is not None
    assert (s.state, s.version) == ("running", f"{lineage.lineage}-4")

    world.client.command("fail", RunCommand(token=lineage.token))
    world.until(lambda: (s := world.searcher()) is not None and s.state == "idle", "the idle searcher")
    assert sigterm(process) == 0
    assert "Traceback" not in world.log()
