"""Waits in tests until a condition is true, instead of sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 180.0
"""Deadline of every single wait; long enough for a very busy machine."""
T = TypeVar("T")


def until(what: str, condition: Callable[[], T], *, deadline_s: float = DEADLINE_S, every_s: float = 0.05) -> T:
    """Poll until `condition()` is true, and return its value; fail after `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(every_s)
    return value
