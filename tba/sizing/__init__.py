"""How much memory, disk and network a run needs, from formulas that docs/operations.md explains (`tba sizing`)."""

from tba.sizing.estimate import Estimate, Load, estimate
from tba.sizing.shape import SHAPES, ModelShape, shape_of_folder

__all__ = ["SHAPES", "Estimate", "Load", "ModelShape", "estimate", "shape_of_folder"]
