"""Find the sizes of a model that a recipe names, without downloading it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tba.config import Recipe
from tba.errors import ConfigError
from tba_cli.sizing.model_shape import SHAPES, ModelShape, known_shape, shape_of_folder

AskHub = Callable[[str, str | None], ModelShape]
"""Returns the sizes of a model on the hub, by name and revision (`tba_cli.artifacts.huggingface.shape_on_hub`)."""


def shape_in_recipe(path: str, recipe: Recipe, *, ask_hub: AskHub | None = None) -> tuple[ModelShape, str]:
    """Return the sizes of the model that is, or will be, in a folder that the recipe names, and where they were found.

    Args:
        ask_hub: asked for a model that is in no table; None: the hub is not asked.

    Raises:
        ConfigError: they are not known; says why.
    """
    folder = Path(path)
    # the folder is exact; the tables below are for models that are not here
    if folder.is_dir():
        return shape_of_folder(folder), f"the folder {folder}"
    if recipe.model.warm_start is not None and path == recipe.model.path:
        return SHAPES["quickstart"], "what [model.warm_start] makes"
    item = next((item for item in recipe.prepare if item.path == path), None)
    name = folder.name if item is None or item.hub is None else item.hub
    if (shape := known_shape(name)) is not None:
        return shape, f"the table of known models ({name})"
    if ask_hub is not None and item is not None and item.hub is not None:
        return ask_hub(item.hub, item.revision), f"config.json of {item.hub} on the hub"
    raise ConfigError(f"{folder} is not here, and {name!r} is in no table of known models")
