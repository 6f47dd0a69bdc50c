"""How much memory, disk and network a run needs, from formulas that docs/sizing.md explains (`tba sizing`)."""

from tba.sizing.estimate import Estimate, Load, estimate
from tba.sizing.shape import MAKER_SHAPES, SHAPES, ModelShape, known_shape, shape_of_config, shape_of_folder

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
]
