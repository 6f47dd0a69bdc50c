"""The settings of a recipe that may change while the run goes on: which they are, and a recipe with changed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from tba.config.base import StrictModel
from tba.config.bounded import KlCoefficient, LearningRate, Probability, Temperature
from tba.config.recipe import Recipe, parse_recipe, sentence_of
from tba.config.schedules import Schedule
from tba.errors import ConfigError
from tba.numbers import MAX_STEP

LiveName = Literal["learning_rate", "beta", "most_on_policy_prob", "sampling_temperature", "eval_every_steps"]
LIVE_NAMES: tuple[LiveName, ...] = get_args(LiveName)
RECIPE_KEYS: dict[LiveName, tuple[str, str]] = {
    "learning_rate": ("trainer", "learning_rate"),
    "beta": ("objective", "beta"),
    "most_on_policy_prob": ("sampling", "most_on_policy_prob"),
    "sampling_temperature": ("searcher", "sampling_temperature"),
    "eval_every_steps": ("eval", "every_steps"),
}
"""Where the recipe has each of them."""


class LiveSettings(StrictModel):
    """Settings of a run that may change while it goes on; None: as the recipe says.

    A number is a constant schedule. Steps of a schedule are optimizer steps of the run, as in the recipe.
    """

    learning_rate: LearningRate | None = None
    """AdamW learning rate (`trainer.learning_rate`)."""
    beta: KlCoefficient | None = None
    """KL coefficient (`objective.beta`)."""
    most_on_policy_prob: Probability | None = None
    """m (`sampling.most_on_policy_prob`)."""
    sampling_temperature: Temperature | None = None
    """Temperature of the behaviour policy (`searcher.sampling_temperature`)."""
    eval_every_steps: int | None = Field(default=None, ge=1, le=MAX_STEP)
    """Optimizer steps between evaluations (`eval.every_steps`)."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_policy_temperature(cls, value: Any) -> Any:
        if isinstance(value, dict) and "policy_temperature" in value:
            raise ValueError(
                "policy_temperature is constant within a run: what is trained is the policy at that temperature; "
                "start another run with another model.policy_temperature, or change sampling_temperature"
            )
        return value

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> LiveSettings:
        """All of them, as a recipe says."""
        values = {name: getattr(getattr(recipe, section), key) for name, (section, key) in RECIPE_KEYS.items()}
        return cls(**values)

    def changed(self) -> dict[LiveName, Schedule | int]:
        """Those that are not as the recipe says."""
        return {name: value for name in LIVE_NAMES if (value := getattr(self, name)) is not None}


def parse_live(document: Mapping[str, Any]) -> LiveSettings:
    """Validate live settings that are a map.

    Raises:
        ConfigError: naming the first one that is wrong, its value and what to do.
    """
    for name, value in document.items():
        if name not in (*LIVE_NAMES, "policy_temperature"):
            raise ConfigError(
                f"live settings: {name!r} (value {value!r}) cannot change while a run goes on; these can: "
                f"{', '.join(LIVE_NAMES)}"
            )
    try:
        return LiveSettings.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"live settings: {sentence_of(error, LiveSettings)}") from None


def with_live(recipe: Recipe, settings: LiveSettings) -> Recipe:
    """The recipe with its live settings changed, checked as a whole.

    Raises:
        ConfigError: a value is not possible, by itself or with the rest of the recipe; names the key and the value.
    """
    changed = settings.changed()
    if not changed:
        return recipe
    beta, preset = settings.beta, recipe.objective.preset
    if beta is not None and recipe.objective.needs_beta and beta.lowest(recipe.trainer.num_steps) <= 0:
        raise ConfigError(
            f"live settings: beta cannot be 0 at any step of this run, because {preset} needs it above 0; set it higher"
        )
    document = recipe.model_dump()
    for name, value in changed.items():
        section, key = RECIPE_KEYS[name]
        document[section][key] = value.model_dump() if isinstance(value, Schedule) else value
    live = parse_recipe(document, where="the run with its live settings")
    if live.objective.needs_reference and not recipe.objective.needs_reference:
        raise ConfigError(
            f"beta above 0 gives {recipe.objective.preset} a KL to a reference, and this run was started without one "
            "(objective.beta 0 in its recipe); start another run with that beta"
        )
    return live
