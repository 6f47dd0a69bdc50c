"""MATH in small learns: rewards raise the accuracy of a starting model that knows the algebra and errs."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.worlds.math.algebra import TABLES
from examples.worlds.math.prepare import CLEAN, MODEL, PUPILS, SIZES, make
from tests.support.e2e import Place
from tests.support.first_command import first_command

RECIPE = Path(__file__).resolve().parents[2] / "examples/worlds/math/math-small.toml"
TIMEOUT_S = 480
NUM_CLEAN_STEPS, NUM_PUPIL_STEPS, NUM_STEPS = 300, 50, 60


def make_starter(folder: Path) -> None:
    """A model of 0.1 M parameters for level 4: squares, answered with a set."""
    clean, pupils = ([row for row in TABLES[name](0) if row["level"] == "Level 4"] for name in ("clean", "sft"))
    folder.parent.mkdir(parents=True)
    make(
        folder,
        clean,
        pupils,
        sizes=replace(SIZES, hidden=64, layers=2, inner=160, initializer_range=0.1),
        clean_steps=replace(CLEAN, num_steps=NUM_CLEAN_STEPS, rate=6e-3, decay_steps=NUM_CLEAN_STEPS // 2),
        pupil_steps=replace(
            PUPILS, num_steps=NUM_PUPIL_STEPS, schedule_steps=NUM_PUPIL_STEPS, decay_steps=NUM_PUPIL_STEPS // 2
        ),
    )


def short_recipe() -> dict[str, Any]:
    document = tomllib.loads(RECIPE.read_text())
    document["data"] |= {"generator": "tests.support.small_worlds:squares", "num_heldout": 50}
    document["trainer"]["num_steps"] = NUM_STEPS
    document["trainer"]["learning_rate"] |= {"value": 1e-3, "warmup_steps": 5}
    document["searcher"] |= {"max_prompt_tokens": 32, "max_response_tokens": 56}
    document["eval"] |= {"every_steps": 1000, "num_prompts": 50, "num_prompts_final": 50, "num_samples": 2}
    return document


@pytest.mark.nightly
def test_accuracy_on_held_out_problems_rises_beyond_noise(tmp_path: Path) -> None:
    place = Place(tmp_path, short_recipe(), first_command())
    make_starter(tmp_path / MODEL)
    try:
        started = place.start()
        assert started.process.wait(TIMEOUT_S) == 0, started.out[-3000:] + started.err[-3000:]
    finally:
        place.close()
    summary = place.summary()
    num, start, final = (summary[key] for key in ("num_heldout_prompts", "start_accuracy", "final_accuracy"))
    # the samples of a prompt count as one: the widest that the error can be
    error = math.sqrt((start * (1 - start) + final * (1 - final)) / num)
    assert final - start > 2 * error, summary
