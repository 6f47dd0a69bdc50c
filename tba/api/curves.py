"""GET /v1/curves: the metrics of the steps, thinned for a plot."""

from __future__ import annotations

from pydantic import Field

from tba.fields import StrictModel


class Curves(StrictModel):
    """Metrics of the acked steps of the active history, oldest first; abandoned steps are left out.

    Point i stands for the steps from `first_steps[i]` to `steps[i]`: with more steps than points, `num_steps_per_point`
    neighbours are one point, with the mean of their known values.
    """

    names: list[str]
    """Every metric that any step has."""
    num_steps: int
    """Steps in the range that was asked for."""
    num_steps_per_point: int = Field(ge=1)
    first_steps: list[int]
    steps: list[int]
    at_s: list[float]
    """When the last step of each point was acked, Unix seconds."""
    values: dict[str, list[float | None]]
    """Name -> one value per point; None: no step of the point knows it."""
    num_abandoned: int
    """Steps that resumes have abandoned."""
