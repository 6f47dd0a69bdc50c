"""examples/worlds/redteam learns: from nothing to attacks that succeed, with less of everything than the recipe."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

from examples.worlds.redteam.prepare import (
    CLASSIFIER,
    POLICY,
    SIZES,
    VICTIM,
    make_classifier,
    make_policy,
    make_victim,
)
from tests.support.e2e import ENDLESS, Place
from tests.support.first_command import first_command

RECIPE = Path(__file__).resolve().parents[2] / "examples/worlds/redteam/redteam-small.toml"
TIMEOUT_S = 480
NUM_SAMPLES = 128
MAX_START, MIN_GAIN = 0.3, 0.3
"""Success rates; the standard error of their difference is at most 0.063 with 128 samples each."""


def test_the_policy_learns_to_attack(tmp_path: Path) -> None:
    document = tomllib.loads(RECIPE.read_text())
    document["trainer"]["num_steps"] = 50
    document["trainer"]["learning_rate"] = 1e-3
    document["eval"].update(every_steps=ENDLESS, num_samples=NUM_SAMPLES)
    (tmp_path / POLICY).parent.mkdir(parents=True)
    small = replace(SIZES, layers=2)
    make_policy(tmp_path / POLICY, sizes=small, num_steps=120, batch_size=32)
    make_victim(tmp_path / VICTIM, sizes=small, num_steps=150, batch_size=32)
    make_classifier(tmp_path / CLASSIFIER, num_steps=40, batch_size=32)
    place = Place(tmp_path, document, first_command())
    try:
        started = place.start()
        assert started.process.wait(TIMEOUT_S) == 0, started.out[-3000:] + started.err[-3000:]
    finally:
        place.close()
    summary = place.summary()
    assert summary["num_unknown_scores"] == 0
    assert summary["start_accuracy"] < MAX_START, "the start model attacks already"
    assert summary["final_accuracy"] > summary["start_accuracy"] + MIN_GAIN
