"""Live settings: which there are, their bounds, and the recipe with them."""

from __future__ import annotations

from typing import Any

import pytest

from tba.config import LIVE_NAMES, LiveSettings, Recipe, Schedule, parse_live, parse_recipe, with_live
from tba.config.live_settings import RECIPE_KEYS
from tba.errors import ConfigError


def recipe_with(**sections: Any) -> Recipe:
    minimal = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"generator": "addition"}}
    return parse_recipe({**minimal, **sections}, where="recipe.toml")


def test_every_live_setting_has_its_place_in_the_recipe() -> None:
    assert set(LiveSettings.model_fields) == set(LIVE_NAMES) == set(RECIPE_KEYS)
    of_recipe = LiveSettings.of_recipe(recipe_with(eval={"every_steps": 9}, objective={"beta": 0.3}))
    assert of_recipe.eval_every_steps == 9
    assert of_recipe.beta == Schedule(value=0.3)
    assert len(of_recipe.changed()) == len(LIVE_NAMES)


def test_a_number_or_a_schedule_takes_the_place_of_the_recipes_value_and_nothing_else_changes() -> None:
    before = recipe_with()
    falling = {"kind": "linear", "value": 0.9, "final": 0.1, "steps": 8}
    after = with_live(before, parse_live({"learning_rate": 0.5, "most_on_policy_prob": falling, "eval_every_steps": 3}))
    assert [after.sampling.most_on_policy_prob.at(step) for step in (0, 4, 8)] == pytest.approx([0.9, 0.5, 0.1])
    assert after.trainer.learning_rate == Schedule(value=0.5)
    assert after.eval.every_steps == 3
    changed = {"trainer": {"learning_rate"}, "sampling": {"most_on_policy_prob"}, "eval": {"every_steps"}}
    assert after.model_dump(exclude=changed) == before.model_dump(exclude=changed)
    assert with_live(before, LiveSettings()) == before
    assert with_live(before, parse_live({"beta": None})) == before


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("sampling", "most_on_policy_prob", 1.01, "at most 1"),
        ("sampling", "most_on_policy_prob", {"kind": "linear", "value": 0.5, "final": 2.0, "steps": 3}, "at most 1"),
        ("sampling", "most_on_policy_prob", -0.1, "greater than or equal to 0"),
        ("searcher", "sampling_temperature", 0.0, "above 0"),
        ("searcher", "sampling_temperature", {"kind": "cosine", "value": 1.0, "steps": 3}, "above 0"),
        ("searcher", "sampling_temperature", "hot", "'hot'"),
    ],
)
def test_m_is_a_probability_and_the_sampling_temperature_above_0_at_every_step(
    section: str, key: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"'{section}\.{key}(\.value)?' has the value .*{message}"):
        recipe_with(**{section: {key: value}})
    with pytest.raises(ConfigError, match=rf"live settings: key '{key}(\.value)?' has the value .*{message}"):
        parse_live({key: value})


def test_numbers_and_schedules_are_read_in_recipes() -> None:
    warm = {"kind": "wsd", "value": 1.5, "final": 0.5, "steps": 10, "warmup_steps": 2, "decay_steps": 4}
    found = recipe_with(
        objective={"preset": "tb"}, sampling={"most_on_policy_prob": 1}, searcher={"sampling_temperature": warm}
    )
    assert found.sampling.most_on_policy_prob.at(99) == 1
    assert [found.searcher.sampling_temperature.at(step) for step in (0, 5, 10)] == pytest.approx([0.75, 1.5, 0.5])


def test_the_policy_temperature_is_constant_within_a_run() -> None:
    with pytest.raises(ConfigError, match=r"policy_temperature is constant within a run.*start another run"):
        parse_live({"policy_temperature": 1.0})


def test_what_cannot_change_is_refused_with_the_names_of_what_can() -> None:
    with pytest.raises(ConfigError, match=r"'num_steps' \(value 9\) cannot change .*learning_rate, beta, most_on"):
        parse_live({"num_steps": 9})


def test_a_live_value_must_go_with_the_whole_recipe() -> None:
    with pytest.raises(ConfigError, match=r"^live settings: beta cannot be 0 at any step of this run, because tb"):
        with_live(recipe_with(objective={"preset": "tb"}), parse_live({"beta": 0}))


def test_a_beta_for_which_the_run_has_no_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"beta above 0 gives grpo a KL to a reference, and this run was started"):
        with_live(recipe_with(objective={"preset": "grpo"}), parse_live({"beta": 0.1}))
    for objective in ({"preset": "grpo", "beta": 0.1}, {"preset": "kimi"}):
        assert with_live(recipe_with(objective=objective), parse_live({"beta": 0.2})).objective.beta == Schedule(
            value=0.2
        )
    assert with_live(recipe_with(objective={"preset": "grpo", "beta": 0.1}), parse_live({"beta": 0.0}))
    with pytest.raises(ConfigError, match="kimi needs it above 0"):
        with_live(recipe_with(objective={"preset": "kimi"}), parse_live({"beta": 0.0}))


@pytest.mark.parametrize("preset", ["kimi", "tba_prime"])
def test_a_live_sampling_temperature_that_makes_the_behaviour_no_earlier_theta_is_refused(preset: str) -> None:
    with pytest.raises(ConfigError, match=r"searcher\.sampling_temperature is 0\.7 at some step and model"):
        with_live(recipe_with(objective={"preset": preset}), parse_live({"sampling_temperature": 0.7}))
    assert with_live(recipe_with(objective={"preset": preset}), parse_live({"sampling_temperature": 1.0}))
    assert with_live(recipe_with(objective={"preset": "tb"}), parse_live({"sampling_temperature": 0.7}))
