"""The recipes of the paper's tasks: each key against the published table."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tba.config import load_recipe

RECIPES = Path("recipes")
TABLE = tomllib.loads(Path("docs/recipes/published.toml").read_text())
FULL = ("gsm8k", "tldr", "tldr-1b", "tldr-2.8b", "redteam", "redteam-llama", "math")
WHOLE = (  # values that are compared as one
    r"data\.sets\.\d+\.data",
    r"reward\.tasks\.[^.]+\.scorers",
    r"(objective\.beta|trainer\.learning_rate|searcher\.temperature_mix)",
    r"eval\.published\.success_above",
)


def document(name: str) -> dict[str, Any]:
    found = tomllib.loads((RECIPES / f"{name}.toml").read_text())
    files = [item["trl_sft"] for item in found.pop("prepare") if "trl_sft" in item]
    for file in files:
        found["trl"] = trl_settings(RECIPES / file)
    return found


def trl_settings(path: Path) -> dict[str, Any]:
    """TRL's settings, with the examples of a step in place of its two factors."""
    found = yaml.safe_load(path.read_text())
    batch_size = found.pop("per_device_train_batch_size") * found.pop("gradient_accumulation_steps")
    return {**found, "batch_size": batch_size}


def flat(value: Any, whole: tuple[str, ...] = (), key: str = "") -> dict[str, Any]:
    """Dotted keys; lists of tables by index. A key that matches `whole` stays one value."""
    if not any(re.fullmatch(pattern, key) for pattern in whole):
        if isinstance(value, dict):
            parts = value.items()
        elif isinstance(value, list) and value and isinstance(value[0], dict) and not key.endswith("references"):
            parts = enumerate(value)
        else:
            return {key: value}
        found: dict[str, Any] = {}
        for part, child in parts:
            found |= flat(child, whole, f"{key}.{part}" if key else str(part))
        return found
    return {key: value}


def tables_of(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the published and the chosen values of a recipe; its own entries go before those that it shares."""
    published: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    own = TABLE["tldr" if name.startswith("tldr") else name]
    for part in (TABLE["every"], TABLE.get(own.get("like", ""), {}), own):
        published = {k: v for k, v in published.items() if k not in part.get("chosen", {})} | part.get("published", {})
        chosen = {k: v for k, v in chosen.items() if k not in part.get("published", {})} | part.get("chosen", {})
    return published, chosen


@pytest.mark.parametrize("name", FULL)
def test_every_key_of_a_full_recipe_is_published_or_chosen_for_a_reason(name):
    published, chosen = tables_of(name)
    for key, value in flat(document(name), WHOLE).items():
        if key in published:
            assert value == published[key]["value"], f"{key}: published by {published[key]['source']}"
        else:
            assert chosen.get(key), f"{key} = {value!r} is in neither table of docs/recipes/published.toml"


@pytest.mark.parametrize("name", FULL)
def test_everything_published_is_in_the_recipe(name):
    published, _ = tables_of(name)
    missing = published.keys() - flat(document(name), WHOLE).keys()
    assert not missing, f"{name}.toml does not set {sorted(missing)}"


def test_the_table_holds_no_reason_for_a_key_that_no_recipe_sets():
    used = {key for name in FULL for key in flat(document(name), WHOLE)}
    reasons = {key for part in TABLE.values() for kind in ("published", "chosen") for key in part.get(kind, {})}
    assert reasons <= used, sorted(reasons - used)


@pytest.mark.parametrize("name", ["tldr-1b", "tldr-2.8b"])
def test_the_larger_tldr_recipes_differ_in_the_models_alone(name):
    small, large = flat(document("tldr")), flat(document(name))
    differs = {key for key in small.keys() | large.keys() if small.get(key) != large.get(key)}
    # a published number belongs to the model that it was measured with
    assert differs == {"run.name", "model.path", "reward.tasks.tldr.scorers.0.model", "eval.published.references"}
    assert "eval.published.references" not in large


@pytest.mark.parametrize("name", FULL)
def test_every_folder_that_a_recipe_names_is_prepared(name):
    recipe = load_recipe(RECIPES / f"{name}.toml")
    paths = {item.path for item in recipe.prepare}
    named = {
        value for value in flat(document(name)).values() if isinstance(value, str) and re.match("(models|data)/", value)
    }
    assert named == paths
