"""The searchers' section: what is refused, in one sentence that names the key, the value and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from tba.config import parse_live, parse_recipe, with_live
from tba.config.searcher import SearcherSection
from tba.errors import ConfigError


def section(**searcher: Any) -> SearcherSection:
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"generator": "addition"}, "searcher": searcher}
    return parse_recipe(document, where="recipe.toml").searcher


@pytest.mark.parametrize(
    ("searcher", "message"),
    [
        ({"top_p": 0.0}, r"searcher\.top_p.* has the value 0\.0"),
        ({"top_p": 1.1}, r"searcher\.top_p.* has the value 1\.1"),
        ({"top_k": -1}, r"searcher\.top_k.* has the value -1"),
        ({"engine": "abacus"}, r"searcher\.engine.* has the value 'abacus'"),
        ({"temperature_mix": {"low": 0.0, "high": 1.0}}, r"temperature_mix\.low.* has the value 0\.0"),
        ({"temperature_mix": {"low": 1.0, "high": 101.0}}, r"temperature_mix\.high.* has the value 101"),
        ({"temperature_mix": {"low": 1.0, "high": 1.0}}, r"low 1 must be below high 1"),
        ({"temperature_mix": {"low": 1.0}}, r"'searcher\.temperature_mix\.high' is missing"),
        (
            {"temperature_mix": {"low": 0.7, "high": 1.3}, "sampling_temperature": 0.9},
            "takes the place of sampling_temperature, and both are given",
        ),
        ({"engine": "vllm", "sampling_temperature": 2.5}, "sampling_temperature reaches 2.5, and vLLM samples at most"),
        ({"engine": "vllm", "temperature_mix": {"low": 1.0, "high": 3.0}}, "temperature_mix reaches 3, and vLLM"),
        ({"tasks": {"a": {"max_response_tokens": 65}}}, r"tasks\.a\.max_response_tokens is 65, above .* 64"),
        (
            {"tasks": {"a": {"max_response_tokens": 5, "min_response_tokens": 6}}},
            r"tasks\.a\.min_response_tokens is 6, above the length limit 5",
        ),
        ({"tasks": {"a": {"min_response_tokens": 65}}}, "is 65, above the length limit 64"),
        ({"tasks": {"a": {"stop": [""]}}}, r"searcher\.tasks\.a\.stop\.0"),
        ({"tasks": {"a": {"stops": ["x"]}}}, r"unknown key 'searcher\.tasks\.a\.stops'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(searcher: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        section(**searcher)
    assert "\n" not in str(caught.value)


def test_a_policy_temperature_that_vllm_cannot_evaluate_at_is_refused() -> None:
    document = {
        "run": {"name": "r"},
        "model": {"path": "m", "policy_temperature": 2.5},
        "data": {"generator": "addition"},
        "objective": {"preset": "tb"},
    }
    parse_recipe(document, where="recipe.toml")
    with pytest.raises(ConfigError, match=r"model\.policy_temperature is 2\.5, and vLLM"):
        parse_recipe({**document, "searcher": {"engine": "vllm"}}, where="recipe.toml")


def test_a_resolved_recipe_with_a_temperature_mix_is_read_again_and_takes_no_live_temperature() -> None:
    mix = {"low": 0.7, "high": 1.3}
    document = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "data": {"generator": "addition"},
        "objective": {"preset": "tb"},
        "searcher": {"temperature_mix": mix},
    }
    recipe = parse_recipe(document, where="recipe.toml")
    assert parse_recipe(recipe.model_dump(mode="json"), where="resolved") == recipe
    with pytest.raises(ConfigError, match="takes the place of sampling_temperature"):
        with_live(recipe, parse_live({"sampling_temperature": 0.5}))
