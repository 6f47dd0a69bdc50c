"""Estimates of the memory, disk and network that a run needs, from formulas that docs/recipes.md explains."""

from tba_cli.sizing.estimate import Estimate, Load, estimate
from tba_cli.sizing.model_shape import (
    MAKER_SHAPES,
    SHAPES,
    ModelShape,
    known_shape,
    shape_of_config,
    shape_of_folder,
    shape_of_new_model,
)

__all__ = [
    "MAKER_SHAPES",
    "SHAPES",
    "Estimate",
    "Load",
    "ModelShape",
    "estimate",
    "known_shape",
    "shape_of_config",
    "shape_of_folder",
    "shape_of_new_model",
]
