"""The recipe of a run as pydantic models: read from TOML, unknown keys refused."""

from tba.config.live_settings import LIVE_NAMES, LiveName, LiveSettings, parse_live, with_live
from tba.config.objective import ObjectiveSection
from tba.config.recipe import Recipe
from tba.config.recipe_file import load_recipe, parse_recipe
from tba.config.schedules import Schedule
from tba.config.trainer import TrainerSection
from tba.fields import StrictModel
