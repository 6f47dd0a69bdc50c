"""Configuration: pydantic models, TOML in, unknown keys refused."""

from tba.config.base import StrictModel
from tba.config.live import LIVE_NAMES, LiveName, LiveSettings, parse_live, with_live
from tba.config.objective import ObjectiveSection
from tba.config.recipe import Recipe, load_recipe, parse_recipe
from tba.config.schedules import Schedule
from tba.config.sections import SamplingSection
from tba.config.training import TrainerSection

__all__ = [
    "LIVE_NAMES",
    "LiveName",
    "LiveSettings",
    "ObjectiveSection",
    "Recipe",
    "SamplingSection",
    "Schedule",
    "StrictModel",
    "TrainerSection",
    "load_recipe",
    "parse_live",
    "parse_recipe",
    "with_live",
]
