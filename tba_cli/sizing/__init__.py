"""The memory and disk that a run needs. The trainer's step is traced; the rest are formulas of docs/recipes.md.

estimate        Redis, store, versions, checkpoints
model_shape     the sizes of a model, from its folder or a table
recipe_shapes   those of a model that a recipe names
gpu_layout      who is on which GPU
gpu_fit         whether it fits, and what to change
"""

from tba_cli.sizing.estimate import Estimate, estimate
from tba_cli.sizing.gpu_fit import CARD_GIB, Card, layout_lines, misfits, simultaneous_starts, trainer_remedy
from tba_cli.sizing.gpu_layout import GIB, ShapeOf, gpu_layout, named_gpus, unknown_sizes
from tba_cli.sizing.model_shape import SHAPES, ModelShape, known_shape, shape_of_config, shape_of_folder
from tba_cli.sizing.recipe_shapes import shape_in_recipe

__all__ = [
    "CARD_GIB",
    "GIB",
    "SHAPES",
    "Card",
    "Estimate",
    "ModelShape",
    "ShapeOf",
    "estimate",
    "gpu_layout",
    "known_shape",
    "layout_lines",
    "misfits",
    "named_gpus",
    "shape_in_recipe",
    "shape_of_config",
    "shape_of_folder",
    "simultaneous_starts",
    "trainer_remedy",
    "unknown_sizes",
]
