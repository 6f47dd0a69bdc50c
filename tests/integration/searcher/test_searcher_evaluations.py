"""Evaluations by a real searcher process: what it measures of each version reaches the buffer, and the best is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.api import EvalInfo, EvalRequest
from tba.versions import START, PolicyVersion
from tests.support.searcher_world import World, publish_version, start_world
from tests.support.tiny_encoder import make_tiny_encoder
from tests.support.tiny_model import make_tiny_model

NUM_HELDOUT, NUM_SAMPLES = 4, 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), seed, hidden_size=32) for seed in (0, 1)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder"))


def evaluate(world: World, version: PolicyVersion) -> EvalInfo:
    info = world.client.request_eval(
        EvalRequest(version=str(version), token=world.lineage.token, num_prompts=NUM_HELDOUT)
    )
    world.until(lambda: world.client.get_eval(info.eval_id).state == "done", f"the evaluation of {version}")
    return world.client.get_eval(info.eval_id)


def test_a_searcher_measures_success_and_diversity_of_exactly_the_pinned_version(
    models: list[Path], encoder: Path, tmp_path: Path
) -> None:
    section = {
        "num_samples": NUM_SAMPLES,
        "num_prompts": NUM_HELDOUT,
        "success_reward": 0.0,
        "embedding_model": str(encoder),
        "pass_at": [2],
        "best_metric": "pass@2",
    }
    world = start_world(tmp_path, models[0], num_heldout=NUM_HELDOUT, eval=section)
    try:
        world.start_reward()
        world.start_searcher()
        start = evaluate(world, START)
        other = PolicyVersion(1, 1)
        publish_version(world.versions, models[1], other, parent=START)
        world.announce(other)
        after = evaluate(world, other)
        best = world.client.run().best
    finally:
        world.stop()
    for info in (start, after):
        assert (info.accuracy, info.pass_at, info.num_unknown) == (1.0, {2: 1.0}, 0)
        assert info.distinct_1 is not None
        assert info.distinct_3 is not None
        assert 0 < info.distinct_1 < info.distinct_3 <= 1
        assert info.embedding_distance is not None
        assert 1e-3 < info.embedding_distance < 2
    assert best is not None
    assert (best.version, best.metric, best.value) == ("1-1", "pass@2", 1.0)  # of equal ones the newest
