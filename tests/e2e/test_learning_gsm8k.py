"""GSM8K in small learns: `tba run` makes the starting model by supervised training, then rewards raise accuracy."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba_cli.starter_models.sample_datasets import Shape, write_dataset
from tba_cli.synthetic_data.word_problems import TABLES
from tests.support.e2e import Place
from tests.support.first_command import first_command

ROOT = Path(__file__).resolve().parents[2]
NUM_CLEAN_STEPS, NUM_SLIP_STEPS, NUM_STEPS = 240, 40, 60
TIMEOUT_S = 480.0
"""A minute on a quiet machine."""


def one_step_problems(split: str) -> Callable[[int], list[dict[str, Any]]]:
    return lambda seed: [row for row in TABLES[split](seed) if row["num_steps"] == 1]


def short_recipe() -> dict[str, Any]:
    """The recipe with a model of 0.1 M parameters, for problems of one step."""
    document = tomllib.loads((ROOT / "recipes" / "gsm8k-small.toml").read_text())
    del document["prepare"]  # the test makes the data set
    clean, slips = document["sft"]
    clean |= {"num_steps": NUM_CLEAN_STEPS, "batch_size": 48, "eval_every_steps": NUM_CLEAN_STEPS}
    clean["learning_rate"] |= {"value": 6e-3, "steps": NUM_CLEAN_STEPS, "warmup_steps": 20, "decay_steps": 100}
    clean["new_model"] |= {"hidden_size": 64, "num_layers": 2, "intermediate_size": 160, "initializer_range": 0.1}
    slips |= {"num_steps": NUM_SLIP_STEPS, "batch_size": 48, "eval_every_steps": NUM_SLIP_STEPS}
    slips["learning_rate"] |= {"steps": NUM_SLIP_STEPS}
    document["trainer"] |= {"num_steps": NUM_STEPS}
    document["trainer"]["learning_rate"] |= {"value": 1e-3, "steps": NUM_STEPS, "warmup_steps": 4, "decay_steps": 30}
    document["sampling"] |= {"min_size_to_sample": 150}
    document["searcher"] |= {"max_prompt_tokens": 48, "max_response_tokens": 30}
    document["eval"] |= {"every_steps": 1000, "num_prompts": 200, "num_prompts_final": 200, "num_samples": 2}
    # other names and things in both; a model this small learns sums by heart, and few problems have one step
    document["data"]["heldout"]["split"], document["data"]["train"]["split"] = "train[:200]", "train[200:]"
    return document


def test_accuracy_on_held_out_problems_rises_beyond_noise(tmp_path: Path) -> None:
    place = Place(tmp_path, short_recipe(), first_command())
    splits = ("sft", "sft_slips", "validation", "train")
    tables = {split: one_step_problems(split) for split in splits}
    # the numbers of all splits, so that the arithmetic is known before the slips
    tables["sft"] = lambda seed: [row for split in ("sft", "train") for row in one_step_problems(split)(seed)]
    write_dataset(tmp_path / "data" / "small" / "gsm8k", Shape("main", tables), seed=0)
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
