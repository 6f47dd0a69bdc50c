"""MATH in small learns: `tba run` makes the starting model in two stages, then rewards raise accuracy."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba_cli.starter_models.sample_datasets import Shape, write_dataset
from tba_cli.synthetic_data.algebra import TABLES
from tests.support.e2e import Place
from tests.support.first_command import first_command

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 480
NUM_CLEAN_STEPS, NUM_PUPIL_STEPS, NUM_STEPS = 300, 50, 60


def level_4(split: str) -> Callable[[int], list[dict[str, Any]]]:
    return lambda seed: [row for row in TABLES[split](seed) if row["level"] == "Level 4"]


def short_recipe() -> dict[str, Any]:
    """The recipe with a model of 0.1 M parameters, for level 4: squares, answered with a set."""
    document = tomllib.loads((ROOT / "recipes" / "math-small.toml").read_text())
    del document["prepare"]  # the test makes the data set
    for sft, num_steps in zip(document["sft"], (NUM_CLEAN_STEPS, NUM_PUPIL_STEPS), strict=True):
        sft |= {"num_steps": num_steps, "eval_every_steps": num_steps}
        sft["learning_rate"] |= {"steps": num_steps, "decay_steps": num_steps // 2}
    document["sft"][0]["learning_rate"]["value"] = 6e-3
    document["sft"][0]["new_model"] |= {
        "hidden_size": 64,
        "num_layers": 2,
        "intermediate_size": 160,
        "initializer_range": 0.1,
    }
    document["trainer"]["num_steps"] = NUM_STEPS
    document["trainer"]["learning_rate"] |= {"value": 1e-3, "warmup_steps": 5}
    document["data"]["heldout"]["split"] = "test+validation"
    document["searcher"] |= {"max_prompt_tokens": 32, "max_response_tokens": 56}
    document["eval"] |= {"every_steps": 1000, "num_prompts": 50, "num_prompts_final": 50, "num_samples": 2}
    return document


def test_accuracy_on_held_out_problems_rises_beyond_noise(tmp_path: Path) -> None:
    place = Place(tmp_path, short_recipe(), first_command())
    tables = {split: level_4(split) for split in TABLES}
    write_dataset(tmp_path / "data" / "small" / "math", Shape("default", tables), seed=0)
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
