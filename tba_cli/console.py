"""The output of `tba run`: its own lines, and prefixed lines of its children above the progress bar."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

Loudness = Literal["quiet", "normal", "verbose"]

# both log formats, and the last words of programs that do not log
_WARNING = re.compile(r"\[(warning|error|critical) *\]|\"level\": ?\"(warning|error|critical)\"|^(error: |Traceback )")
_STYLES = {"trainer": "green", "buffer": "cyan", "reward": "magenta", "warm-start": "yellow"}
_NAME_WIDTH = 11


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
        self._rich: RichConsole | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether a person watches, so that a progress bar is drawn."""
        return self._out.isatty()

    @property
    def rich(self) -> RichConsole:
        """The rich console that the progress bar lives on, so that lines appear above it."""
        if self._rich is None:
            from rich.console import Console as RichConsole

            # lines of children must be neither coloured nor broken
            self._rich = RichConsole(file=self._out, highlight=False, soft_wrap=True)
        return self._rich

    def info(self, text: str) -> None:
        """Print a line about what the launcher does."""
        if self.loudness != "quiet":
            self._print(text)

    def result(self, text: str) -> None:
        """Print a line even when quiet."""
        self._print(text)

    def child_line(self, name: str, line: str) -> None:
        """Print a line of a child's output with its name in front, if the loudness allows it."""
        if self.loudness == "verbose" or (self.loudness == "normal" and _WARNING.search(line)):
            self._print(line, name=name)

    @property
    def _out(self) -> TextIO:
        return self._stream or sys.stdout

    def _print(self, text: str, *, name: str | None = None) -> None:
        try:
            self._write(text, name)
        except OSError:  # the reader or the terminal is gone; the run continues without it
            self._stream, self._rich = open(os.devnull, "w", encoding="utf-8"), None  # noqa: SIM115 - as long as the process

    def _write(self, text: str, name: str | None) -> None:
        if not self.is_terminal:
            prefix = "" if name is None else f"{name:<{_NAME_WIDTH}} | "
            print(prefix + text, file=self._out, flush=True)
            return
        from rich.text import Text

        prefix = Text() if name is None else Text(f"{name:<{_NAME_WIDTH}} | ", style=_STYLES.get(name, "blue"))
        self.rich.print(prefix + Text(text))
