"""SIGTERM and SIGINT while a service starts: the process ends at once, with its exit code and one line.

A start may take minutes: torch is imported, a model is loaded, an index is rebuilt. Nothing of that needs an orderly
end, since everything here survives `kill -9` at any moment.

A process calls `quit_on_signals` first, before it imports anything heavy; so this module imports the standard library
alone. Services install handlers of their own later, and this one does nothing while those are installed. A process of
number 1 needs a handler: without one the kernel keeps SIGTERM from it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

EXIT_STOPPED = 143
"""Exit code of a trainer that SIGTERM stopped before the run was over: 128 + 15, as in a shell. A Job must not count it
as success."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + 2, as in a shell."""


_quit: Callable[[int], None] | None = None
"""Ends the process while it starts."""


def open_streams() -> None:
    """Make the standard streams usable: a closed one (`>&-`) leads nowhere, and none fails at a character that the
    locale lacks."""
    # in this order: a new file takes the lowest number that is free, which no other file must get
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper) and mode == "w":
            stream.reconfigure(errors="backslashreplace")


def quit_on_signals(name: str, *, code: int = 0) -> None:
    """Let SIGTERM and SIGINT end this process at once from now on; main thread only.

    Args:
        code: exit code after SIGTERM; after SIGINT it is 130.
    """
    global _quit
    open_streams()

    def quit(number: int) -> None:
        with suppress(OSError):  # stderr is closed
            os.write(2, f"{name}: {signal.Signals(number).name} while it starts: it ends\n".encode())
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else code)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        quit_if_starting(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    _quit = quit
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def quit_if_starting(number: int) -> None:
    """End the process if it still starts; for another handler that is installed before the start is over."""
    if _quit is not None:
        _quit(number)


def mark_started() -> None:
    """End the start: SIGTERM does nothing from now on unless another handler is installed, and SIGINT is
    KeyboardInterrupt again."""
    global _quit
    _quit = None
