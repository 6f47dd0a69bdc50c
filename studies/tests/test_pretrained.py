"""studies/pretrained.py: when a run reached a reward, the recipe of a cell, and the tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from studies.data_file import append_line
from studies.pretrained import (
    NUM_STEPS,
    RECIPE,
    WINDOW,
    Cell,
    Result,
    Side,
    read_results,
    recipe_of,
    tables,
)
from studies.pretrained_trl_program import reward_of
from tba.config import load_recipe


def make_result(rewards: list[float], *, side: Side = "trl", rate: float = 1e-5, seed: int = 100) -> Result:
    cell = Cell(side=side, learning_rate=rate, schedule="constant", seed=seed)
    second = 20.0 if side == "trl" else 5.0
    steps = [
        {"step": number, "seconds": second * number, "reward": reward, "num_tokens": 640, "num_rollouts": 32}
        for number, reward in enumerate(rewards, 1)
    ]
    return Result(cell=cell, start_s=10.0, peak_bytes=2**30, steps=steps)


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.2] * 4 + [0.9], None),
        ([0.2] * 5, None),
        ([1.0] * (WINDOW - 1), None),
        ([0.2, 0.2] + [0.6] * WINDOW, 6),
        ([0.5] * WINDOW, 5),
    ],
)
def test_a_target_is_reached_by_the_mean_of_the_last_batches(rewards: list[float], step: int | None):
    found = make_result(rewards).reached(0.5)
    assert (None if found is None else found["step"]) == step


def test_a_cell_has_the_recipe_of_make_real_but_for_rate_prompts_and_evaluations():
    recipe, _ = recipe_of(Cell(side="tba", learning_rate=4e-5, schedule="linear", seed=3))
    rate = recipe.trainer.learning_rate
    assert (rate.kind, rate.value, rate.final, rate.steps) == ("linear", 4e-5, 0.0, NUM_STEPS)
    given = load_recipe(RECIPE).model_dump()
    changed = {
        f"{section}.{key}"
        for section, keys in recipe.model_dump().items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if value != given[section][key]
    }
    assert changed == {
        *("run.seed", "data.selection", "eval.every_steps", "eval.num_prompts", "eval.num_prompts_final"),
        *("trainer.num_steps", "trainer.learning_rate", "trainer.checkpoint_interval", "trainer.export"),
    }


def test_the_reward_of_trl_is_the_rule_of_the_recipe():
    pytest.importorskip("reasoning_gym", reason="the rule is the library's")
    scored: list[dict[str, float]] = []
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    reward = reward_of({"extract": "last_number", "partial": False}, scored)
    found = reward(["", ""], ["It is 3.", "It is 4."], [[1, 2], [3]], [json.dumps(entry)] * 2)
    assert found == [1.0, 0.0]
    assert scored == [{"reward": 0.5, "num_tokens": 3, "num_rollouts": 2}]


def test_tables_have_every_run_and_the_ratio_of_seeds_that_both_sides_have(tmp_path: Path):
    data, quick = tmp_path / "trl.jsonl", [0.9] * WINDOW
    for seed in (0, 1):
        for side, num in (("trl", 10), ("tba", 20)):
            append_line(data, asdict(make_result([0.1] * num + quick, side=side, seed=seed)))
    append_line(data, asdict(make_result([0.1] * 6, side="tba", seed=2)))  # without its pair
    append_line(data, asdict(make_result(quick, rate=8e-5, seed=0)))  # of another rate
    append_line(data, asdict(make_result(quick, side="tba")))  # of tuning
    text = "\n".join(tables(read_results(data)))
    assert "| trl | 8e-05 constant | 0 | 5 | 5 | 100 | 5 | 100 | 0.90 |" in text
    assert "| tba | 1e-05 constant | 2 | 6 | - | - | - | - | 0.10 |" in text
    # 0.5 comes with the third good batch: step 13 of TRL, step 23 of tba
    assert "| seconds to 0.5 | 260 | 115 | 260 | 115 | **2.26** (2.26 to 2.26) |" in text
    assert "| step to 0.5 | 13 | 23 | 13 | 23 | **0.57** (0.57 to 0.57) |" in text
    assert "| seconds per step | 20 | 5 | 20 | 5 | **4.00** (4.00 to 4.00) |" in text
    assert text.count("ratios are") == 1
