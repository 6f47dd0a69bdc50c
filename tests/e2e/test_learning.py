"""The worlds learn: smaller models, on a part of the problems, gain in fewer steps than the recipes have."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.worlds import conversations
from examples.worlds.calculator.prepare import WORLD as CALCULATOR
from examples.worlds.gsm8k import prepare as gsm8k
from examples.worlds.gsm8k import word_problems
from examples.worlds.redteam import prepare as redteam
from examples.worlds.rows import distinct_prompts
from examples.worlds.tldr import prepare as tldr
from tba.api import Prompt
from tests.support.e2e import ENDLESS, Place

WORLDS = Path(__file__).resolve().parents[2] / "examples/worlds"
TIMEOUT_S = 480.0
"""About a minute on a quiet machine."""


def recipe_of(world: str, name: str = "{}-small.toml") -> dict[str, Any]:
    document = tomllib.loads((WORLDS / world / name.format(world)).read_text())
    document["eval"]["every_steps"] = ENDLESS
    return document


def run(folder: Path, document: dict[str, Any]) -> Place:
    place = Place(folder, document)
    try:
        started = place.start()
        assert started.process.wait(TIMEOUT_S) == 0, started.out[-3000:] + started.err[-3000:]
    finally:
        place.close()
    assert place.summary()["num_unknown_scores"] == 0
    return place


def one_step_problems(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return word problems of one step; the held-out ones have other names and things, and numbers that are known.

    A model this small learns sums by heart, and few problems have one step.
    """
    rows = [row for row in word_problems.TABLES["train"](0) if row["num_steps"] == 1]
    made = [word_problems.prompt_of(row) for row in rows]
    heldout = distinct_prompts("gsm8k", "heldout", made[:num_heldout], num_heldout)
    return heldout + distinct_prompts("gsm8k", "train", made[num_heldout:], num_train)


@pytest.mark.nightly
def test_accuracy_on_word_problems_rises_beyond_noise(tmp_path: Path) -> None:
    tables = word_problems.TABLES
    rows = {name: [row for row in tables[name](0) if row["num_steps"] == 1] for name in ("sft", "train", "sft_slips")}
    clean = {"num_steps": 240, "batch_size": 48, "rate": 6e-3, "warmup_steps": 20, "decay_steps": 100}
    (tmp_path / gsm8k.MODEL).parent.mkdir(parents=True)
    gsm8k.make(
        tmp_path / gsm8k.MODEL,
        # the numbers of all splits, so that the arithmetic is known before the slips
        [*rows["sft"], *rows["train"]],
        rows["sft_slips"],
        sizes=replace(gsm8k.SIZES, hidden=64, layers=2, inner=160, initializer_range=0.1),
        clean_steps=replace(gsm8k.CLEAN, **clean),
        slip_steps=replace(gsm8k.SLIPS, num_steps=40, batch_size=48),
    )
    document = recipe_of("gsm8k")
    document["data"] |= {"generator": "tests.e2e.test_learning:one_step_problems", "num_heldout": 200}
    document["trainer"]["num_steps"] = 90
    document["trainer"]["learning_rate"] |= {"value": 5e-4, "steps": 90, "warmup_steps": 4, "decay_steps": 45}
    document["sampling"]["min_size_to_sample"] = 150
    document["searcher"] |= {"max_prompt_tokens": 48, "max_response_tokens": 30}
    document["eval"] |= {"num_prompts": 200, "num_prompts_final": 200, "num_samples": 2}
    summary = run(tmp_path, document).summary()
    num, start, final = (summary[key] for key in ("num_heldout_prompts", "start_accuracy", "final_accuracy"))
    # the samples of a prompt count as one: the widest that the error can be
    assert final - start > 2 * math.sqrt((start * (1 - start) + final * (1 - final)) / num), summary


def test_the_policy_learns_to_call_tools(tmp_path: Path) -> None:
    """Within 20 of the recipe's 60 steps; the standard error of 128 prompts is at most 0.044."""
    conversations.make(CALCULATOR, tmp_path / "models/worlds/calculator")
    document = recipe_of("calculator", "{}.toml")
    document["trainer"]["num_steps"] = 20
    document["eval"]["num_prompts_final"] = document["data"]["num_heldout"] = 128
    summary = run(tmp_path, document).summary()
    assert summary["start_accuracy"] < min(0.4, summary["final_accuracy"] - 0.3)


@pytest.mark.nightly
def test_the_policy_learns_to_attack(tmp_path: Path) -> None:
    """From nothing to attacks that succeed; the standard error of the gain is at most 0.063 with 128 samples each."""
    document = recipe_of("redteam")
    document["trainer"] |= {"num_steps": 50, "learning_rate": 1e-3}
    document["eval"]["num_samples"] = 128
    (tmp_path / redteam.POLICY).parent.mkdir(parents=True)
    small = replace(redteam.SIZES, layers=2)
    redteam.make_policy(tmp_path / redteam.POLICY, sizes=small, num_steps=120, batch_size=32)
    redteam.make_victim(tmp_path / redteam.VICTIM, sizes=small, num_steps=150, batch_size=32)
    redteam.make_classifier(tmp_path / redteam.CLASSIFIER, num_steps=40, batch_size=32)
    summary = run(tmp_path, document).summary()
    assert summary["start_accuracy"] < 0.3, "the start model attacks already"
    assert summary["final_accuracy"] > summary["start_accuracy"] + 0.3


@pytest.mark.nightly
def test_the_policy_learns_what_the_proxy_prefers(tmp_path: Path) -> None:
    """Standard errors of 256 posts were 0.038 before training and 0.027 after it (docs/results.md)."""
    document = recipe_of("tldr")
    # without the gold judge: nothing is trained on it
    document["prepare"] = [item for item in document["prepare"] if item["path"] != str(tldr.GOLD)]
    del document["reward"]["tasks"]["tldr_win_rate"]
    document["eval"]["published"]["tasks"] = ["tldr", "tldr_good"]
    # with a high rate and old data, whether so short a run learns depends on the speed of the machine
    document["trainer"].update(num_steps=40, sync_interval=2, learning_rate=5e-4)
    document["objective"]["beta"]["steps"] = 10
    document["sampling"].update(prompts_per_batch=4, min_size_to_sample=80, samples_per_insert_error=80)
    document["buffer"]["deduplicate"] = False
    document["eval"]["num_prompts_final"] = 128
    (tmp_path / tldr.POLICY).parent.mkdir(parents=True)
    sizes = replace(tldr.SIZES, hidden=64, layers=2, inner=256)
    tldr.make_policy(tmp_path / tldr.POLICY, sizes=sizes, how=replace(tldr.POLICY_STEPS, num_steps=120))
    tldr.make_proxy(tmp_path / tldr.PROXY, base=tmp_path / tldr.POLICY, num_steps=60)
    place = run(tmp_path, document)
    records = map(json.loads, (place.folder / "metrics.jsonl").read_text().splitlines())
    evaluations = [record["metrics"] for record in records if record["kind"] == "evaluation"]
    assert [each["num_prompts"] for each in evaluations] == [128] * 2
    start, final = (each["mean_reward"] for each in evaluations)
    assert final > start + 0.15
