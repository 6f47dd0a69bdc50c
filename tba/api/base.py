"""Types that several bodies share, and the problem document."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from tba.config.base import StrictModel

RunState = Literal["running", "paused", "stopping", "done", "failed"]
Split = Literal["train", "heldout"]
VersionText = Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,12}$")]
Name = Annotated[str, Field(min_length=1, max_length=256)]
MAX_LINEAGE = 10**9 - 1
MAX_STEP = 10**12 - 1
"""The largest that a version text holds."""
Integer = Annotated[int, Strict()]
"""A whole number of a request; `true` and `"1"` are none. Bounds belong to the field: two of a kind do not add up."""
Number = Annotated[float, Strict()]
"""A finite number of a request; `true` and `"1"` are none."""


class Problem(StrictModel):
    """RFC 9457 problem document."""

    type: str
    title: str
    status: int
    detail: str
    retry_after_s: float | None = None
    wait: str | None = None
