"""Print the output of commands. `tba run` also prints its children's lines, each with the child's name in front."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TextIO

from tba.fields import StrictModel, escape_controls

Loudness = Literal["quiet", "normal", "verbose"]

# both log formats, and the last words of programs that do not log
_WARNING = re.compile(r"\[(warning|error|critical) *\]|\"level\": ?\"(warning|error|critical)\"|^(error: |Traceback )")
_NAME_WIDTH = 11


def print_answer(answer: StrictModel | Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Print an answer as JSON or as lines of text, with control characters escaped."""
    if not as_json:
        print("\n".join(map(escape_controls, lines)))
    elif isinstance(answer, StrictModel):
        print(answer.model_dump_json(indent=2, ensure_ascii=True))
    else:
        print(json.dumps(answer, indent=2))


def known(value: float | None, form: str = ".3f") -> str:
    """Return a number as text in the format `form`, or `unknown` for None."""
    return "unknown" if value is None else format(value, form)


class Console:
    """Prints lines for people.

    Args:
        loudness: `quiet` prints only results and warnings of the launcher, `normal` adds progress and the children's
            warnings and errors, `verbose` adds every line of the children.
        stream: where to print; default: stdout.
    """

    def __init__(self, loudness: Loudness, *, stream: TextIO | None = None) -> None:
        self.loudness = loudness
        self._stream = stream

    def info(self, text: str) -> None:
        """Print a line about what the launcher does."""
        if self.loudness != "quiet":
            self.result(text)

    def result(self, text: str) -> None:
        """Print a line even when quiet."""
        try:
            print(text, file=self._stream or sys.stdout, flush=True)
        except OSError:  # the reader or the terminal is gone; the run continues without it
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process

    def child_line(self, name: str, line: str) -> None:
        """Print a line of a child's output with its name in front, if the loudness allows it."""
        if self.loudness == "verbose" or (self.loudness == "normal" and _WARNING.search(line)):
            self.result(f"{name:<{_NAME_WIDTH}} | {escape_controls(line)}")
