"""GSM8K in small learns: rewards raise the accuracy of a starting model that knows the arithmetic and errs."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.worlds.gsm8k.prepare import CLEAN, MODEL, SIZES, SLIPS, make
from examples.worlds.gsm8k.word_problems import TABLES
from tests.support.e2e import Place
from tests.support.first_command import first_command

RECIPE = Path(__file__).resolve().parents[2] / "examples/worlds/gsm8k/gsm8k-small.toml"
NUM_CLEAN_STEPS, NUM_SLIP_STEPS, NUM_STEPS = 240, 40, 60
TIMEOUT_S = 480.0
"""A minute on a quiet machine."""


def make_starter(folder: Path) -> None:
    """A model of 0.1 M parameters for problems of one step."""
    rows = {name: [row for row in TABLES[name](0) if row["num_steps"] == 1] for name in ("sft", "train", "sft_slips")}
    folder.parent.mkdir(parents=True)
    make(
        folder,
        # the numbers of all splits, so that the arithmetic is known before the slips
        [*rows["sft"], *rows["train"]],
        rows["sft_slips"],
        sizes=replace(SIZES, hidden=64, layers=2, inner=160, initializer_range=0.1),
        clean_steps=replace(
            CLEAN, num_steps=NUM_CLEAN_STEPS, batch_size=48, rate=6e-3, warmup_steps=20, decay_steps=100
        ),
        slip_steps=replace(SLIPS, num_steps=NUM_SLIP_STEPS, batch_size=48),
    )


def short_recipe() -> dict[str, Any]:
    document = tomllib.loads(RECIPE.read_text())
    document["data"] |= {"generator": "tests.support.small_worlds:one_step_problems", "num_heldout": 200}
    document["trainer"] |= {"num_steps": NUM_STEPS}
    document["trainer"]["learning_rate"] |= {"value": 1e-3, "steps": NUM_STEPS, "warmup_steps": 4, "decay_steps": 30}
    document["sampling"] |= {"min_size_to_sample": 150}
    document["searcher"] |= {"max_prompt_tokens": 48, "max_response_tokens": 30}
    document["eval"] |= {"every_steps": 1000, "num_prompts": 200, "num_prompts_final": 200, "num_samples": 2}
    return document


@pytest.mark.nightly
def test_accuracy_on_held_out_problems_rises_beyond_noise(tmp_path: Path) -> None:
    place = Place(tmp_path, short_recipe(), first_command())
    make_starter(tmp_path / MODEL)
    try:
        started = place.start()
        assert started.process.wait(TIMEOUT_S) == 0, started.err + started.out
    finally:
        place.close()
    summary = place.summary()
    num, start, final = (summary[key] for key in ("num_heldout_prompts", "start_accuracy", "final_accuracy"))
    assert num == 200
    # the samples of a prompt count as one: the widest that the error can be
    error = math.sqrt((start * (1 - start) + final * (1 - final)) / num)
    assert final - start > 2 * error, summary
