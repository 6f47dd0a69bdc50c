"""The base of every config model: unknown keys refused, values frozen, attribute docstrings are the help text."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A config section or a REST body: a key that is not in the model is an error, never ignored."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
