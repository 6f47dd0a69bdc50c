"""The settings of a recipe that may change during the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from tba.config.recipe import Recipe
from tba.config.recipe_file import explain_validation_error, parse_recipe
from tba.config.schedules import KlCoefficient, LearningRate, Probability, Schedule, Temperature
from tba.errors import ConfigError
from tba.fields import MAX_STEP, StrictModel

LiveName = Literal["learning_rate", "beta", "most_on_policy_prob", "sampling_temperature", "eval_every_steps"]
LIVE_NAMES: tuple[LiveName, ...] = get_args(LiveName)
RECIPE_KEYS: dict[LiveName, tuple[str, str]] = {
    "learning_rate": ("trainer", "learning_rate"),
    "beta": ("objective", "beta"),
    "most_on_policy_prob": ("sampling", "most_on_policy_prob"),
    "sampling_temperature": ("searcher", "sampling_temperature"),
    "eval_every_steps": ("eval", "every_steps"),
}
"""The recipe's section and key of each live setting."""
AS_RECIPE = "recipe"
"""Word that people read and type in place of a value: the live setting has the recipe's value."""


class LiveSettings(StrictModel):
    """Settings that may change during a run; None: the recipe's value.

    Learning rate and beta are schedules, and a plain number is a constant schedule. The steps of a schedule count from
    the start of the run, as in the recipe.
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

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> LiveSettings:
        """Return all live settings with the values of a recipe."""
        values = {name: getattr(getattr(recipe, section), key) for name, (section, key) in RECIPE_KEYS.items()}
        return cls(**values)

    def changed(self) -> dict[LiveName, Schedule | float]:
        """Return name -> value of the settings that are not None."""
        return {name: value for name in LIVE_NAMES if (value := getattr(self, name)) is not None}


def parse_live(document: Mapping[str, Any]) -> LiveSettings:
    """Validate a map of names and values as live settings; raise ConfigError for a wrong name or value."""
    for name, value in document.items():
        if name not in LIVE_NAMES:
            raise ConfigError(
                f"live settings: {name!r} (value {value!r}) cannot change while a run continues; these can: "
                f"{', '.join(LIVE_NAMES)}"
            )
    try:
        return LiveSettings.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"live settings: {explain_validation_error(error, LiveSettings)}") from None


def with_live(recipe: Recipe, settings: LiveSettings) -> Recipe:
    """Return the recipe with the live settings in it; raise ConfigError if the recipe as a whole is then not valid."""
    changed = settings.changed()
    if not changed:
        return recipe
    beta, preset = settings.beta, recipe.objective.preset
    # a whole recipe with this beta would be refused as well, in words about the recipe file
    if beta is not None and recipe.objective.needs_beta and beta.lowest(recipe.trainer.num_steps) <= 0:
        raise ConfigError(
            f"live settings: beta cannot be 0 at any step of this run, because {preset} needs it above 0; set it higher"
        )
    document = recipe.model_dump()
    for name, value in changed.items():
        section, key = RECIPE_KEYS[name]
        document[section][key] = value.model_dump() if isinstance(value, Schedule) else value
    # rules between settings hold for live settings too, for example beta and the preset
    live = parse_recipe(document, where="the run with its live settings")
    # the trainer has loaded no reference model, and rollouts carry no ref log-probs
    if live.objective.needs_reference and not recipe.objective.needs_reference:
        raise ConfigError(
            f"beta above 0 gives {recipe.objective.preset} a KL to a reference, and this run was started without one "
            "(objective.beta 0 in its recipe); start another run with that beta"
        )
    return live


def setting_text(value: Schedule | float | None) -> str:
    """Return the value of a live setting as text for people."""
    if value is None:
        return AS_RECIPE
    if not isinstance(value, Schedule):
        return f"{value:.15g}"
    text = f"{value.value:g}"
    if value.kind != "constant":
        text = f"{value.kind} {text} to {value.final:g} over {value.steps} steps"
    return text + (f" after {value.warmup_steps} of warm-up" if value.warmup_steps else "")
