"""Estimates of the memory, disk and network that a run needs, from formulas that docs/recipes.md explains."""

from tba_cli.sizing.estimate import Estimate, Load, estimate, operations_per_parameter
from tba_cli.sizing.gpu_fit import (
    CARD_GIB,
    USABLE_SHARE,
    Card,
    idle_gpus,
    layout_lines,
    misfits,
    other_recomputation,
    preemptions,
    simultaneous_starts,
    unknown_sizes,
)
from tba_cli.sizing.gpu_layout import GIB, ShapeOf, gpu_layout, named_gpus
from tba_cli.sizing.loop_cost import LoopCost, loop_costs
from tba_cli.sizing.model_shape import (
    MAKER_SHAPES,
    SHAPES,
    ModelShape,
    known_shape,
    shape_of_config,
    shape_of_folder,
    shape_of_new_model,
)
from tba_cli.sizing.recipe_shapes import shape_in_recipe

__all__ = [
    "CARD_GIB",
    "GIB",
    "MAKER_SHAPES",
    "SHAPES",
    "USABLE_SHARE",
    "Card",
    "Estimate",
    "Load",
    "LoopCost",
    "ModelShape",
    "ShapeOf",
    "estimate",
    "gpu_layout",
    "idle_gpus",
    "known_shape",
    "layout_lines",
    "loop_costs",
    "misfits",
    "named_gpus",
    "operations_per_parameter",
    "other_recomputation",
    "preemptions",
    "shape_in_recipe",
    "shape_of_config",
    "shape_of_folder",
    "shape_of_new_model",
    "simultaneous_starts",
    "unknown_sizes",
]
