"""Types that several bodies share, and the problem document."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict

from tba.config.base import StrictModel
from tba.numbers import bounded
from tba.plain_text import control_problem, one_line

RunState = Literal["running", "paused", "stopping", "done", "failed"]
Split = Literal["train", "heldout"]
VersionText = Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,12}$")]
MAX_REASON_CHARS = 10_000


def _without_controls(text: str) -> str:
    if problem := control_problem(text):
        raise ValueError(problem)
    return text


Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_without_controls)]
"""An id or another short text of a client; control characters are refused."""
Reason = Annotated[str, Field(max_length=MAX_REASON_CHARS), AfterValidator(one_line)]
"""Why somebody asks for something, for people; a space takes the place of control characters."""
Integer = Annotated[int, Strict(), AfterValidator(bounded)]
"""A whole number of a request (tba/numbers.py); `true` and `"1"` are none. Its own bounds belong to the field: two of a
kind do not add up."""
Number = Annotated[float, Strict(), AfterValidator(bounded)]
"""A number of a request (tba/numbers.py); `true` and `"1"` are none."""


class Problem(StrictModel):
    """RFC 9457 problem document."""

    type: str
    title: str
    status: int
    detail: str
    retry_after_s: float | None = None
    wait: str | None = None
