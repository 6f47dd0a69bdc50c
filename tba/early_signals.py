"""End a process at once on SIGTERM or SIGINT while its service starts, with an exit code and one line on stderr.

A start may take minutes: torch is imported, a model is loaded, an index is rebuilt. None of that needs a graceful
shutdown, because every service survives `kill -9` at any moment.

A process calls `quit_on_signals` first, before heavy imports, so this module imports only the standard library. Later,
services install handlers of their own. A process with id 1, as in a container, needs a handler: without one the kernel
does not deliver SIGTERM to it.
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
"""Exit code of a trainer that SIGTERM stopped before the end of the run: 128 + 15, as in a shell. A Kubernetes Job must
not count it as success."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + 2, as in a shell."""


_quit: Callable[[int], None] | None = None
"""Ends the process; None once the start is over."""


def open_streams() -> None:
    """Replace closed standard streams (`>&-`) by /dev/null, and let output escape characters that the locale lacks."""
    # in this order: a new file takes the lowest number that is free, which no other file must get
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper) and mode == "w":
            stream.reconfigure(errors="backslashreplace")


def quit_on_signals(name: str, *, code: int = 0) -> None:
    """Make SIGTERM and SIGINT end this process at once until `mark_started`; call it in the main thread.

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
    """End the process if its start is not over; other signal handlers call this."""
    if _quit is not None:
        _quit(number)


def mark_started() -> None:
    """Declare the start over: `quit_on_signals` now ignores SIGTERM, and raises KeyboardInterrupt for SIGINT."""
    global _quit
    _quit = None
