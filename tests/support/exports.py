"""Versions to export: a store with published models, and the facts about their run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tba.api import BestVersion, EvalInfo
from tba.config import Recipe
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.weights.export import RunFacts
from tests.support.searcher_world import publish_version
from tests.support.trainer_values import make_recipe

BEST = BestVersion(version="1-4", metric="accuracy", value=0.75, num_prompts=128, num_samples=4)


def make_eval(version: str, **changes: Any) -> EvalInfo:
    values: dict[str, Any] = {
        "eval_id": f"eval-{version}",
        "version": version,
        "state": "done",
        "num_prompts": 128,
        "num_done": 128,
        "accuracy": 0.5,
        "greedy_accuracy": 0.625,
        "mean_reward": 0.5,
        "mean_response_tokens": 3.5,
        "created_at_s": 1.0,
    }
    return EvalInfo(**{**values, **changes})


def make_facts(recipe: Recipe, **changes: Any) -> RunFacts:
    """Return facts of a run with two evaluated versions, of which 1-4 is better."""
    evals = [make_eval("0-0", accuracy=0.25), make_eval("1-4", accuracy=0.75, pass_at={4: 0.875})]
    return RunFacts(**{"recipe": recipe, "evals": evals, "best": BEST, **changes})


def published(folder: Path, models: dict[str, Path]) -> tuple[FileStore, WeightVersions, Recipe]:
    """Publish one version per model folder (version -> folder); return the store, its versions and a recipe."""
    store = FileStore(folder / "store")
    recipe = make_recipe(next(iter(models.values())), store={"url": f"file://{folder / 'store'}"})
    versions = WeightVersions(store, recipe.run.name)
    for text, model in models.items():
        publish_version(versions, model, PolicyVersion.parse(text))
    return store, versions, recipe


@torch.inference_mode()
def transformers_greedy(folder: Path, prompts: list[str], *, num_tokens: int) -> list[list[int]]:
    """Return greedy tokens of transformers as [prompt][token]; end of sequence does not end a response."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        ids: list[int] = list(tokenizer(prompt)["input_ids"])
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[-num_tokens:])
    return found
