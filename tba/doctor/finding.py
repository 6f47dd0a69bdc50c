"""What a probe found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    `warn` will hurt sooner or later, or cannot be judged yet; `fail` keeps the run from working; `skip` was not looked
    at, for the reason that `found` gives.
    """

    code: str
    """Name of the finding; docs/doctor.md has a line for each."""
    level: Level
    found: str
    mend: str | None = None
    """What to do; for `warn` and `fail`."""


def ok(code: str, found: str) -> Finding:
    """All is well."""
    return Finding(code, "ok", found)


def warn(code: str, found: str, mend: str) -> Finding:
    """It works, or may work, but not for ever."""
    return Finding(code, "warn", found, mend)


def fail(code: str, found: str, mend: str) -> Finding:
    """The run cannot work so."""
    return Finding(code, "fail", found, mend)


def skip(code: str, found: str) -> Finding:
    """Not looked at, and why."""
    return Finding(code, "skip", found)
