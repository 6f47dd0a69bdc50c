"""Configuration: pydantic models, TOML in, unknown keys refused."""

from tba.config.base import StrictModel
from tba.config.recipe import Recipe, load_recipe, parse_recipe
from tba.config.schedules import Schedule
from tba.config.sections import SamplingSection
from tba.config.training import ObjectiveSection, TrainerSection

__all__ = [
    "ObjectiveSection",
    "Recipe",
    "SamplingSection",
    "Schedule",
    "StrictModel",
    "TrainerSection",
    "load_recipe",
    "parse_recipe",
]
