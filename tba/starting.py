"""SIGTERM and SIGINT while a service starts: it ends at once, with its exit code and one line.

A start may take minutes: torch is imported, a model is loaded, another service is waited for, an index is rebuilt.
Nothing of that has to be ended in order, since everything here survives `kill -9` at any moment; so the process just
goes. The main thread may be deep in a library meanwhile, where no handler of Python runs: then a thread that reads the
signal from a socket ends the process.

The first thing that a process does is `quit_on_signals`, before it imports anything heavy; so this module imports the
standard library alone. Who ends in order later installs handlers of its own, and this one rests while they are there.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

EXIT_STOPPED = 143
"""A trainer that SIGTERM stopped before the run was over, as a shell says it: 128 + 15. A Job must not count it as
success."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as a shell says it: 128 + 2."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Start:
    """The start of this process.

    Args:
        name: of the service, for people.
        code: exit code after SIGTERM.
    """

    def __init__(self, name: str, code: int) -> None:
        self._name, self._code = name, code
        self._folders: set[Path] = set()
        self._first = threading.Lock()
        self.is_over = False

    def on_signal(self, number: int, _frame: FrameType | None = None) -> None:
        """The handler."""
        if not self.is_over:
            self.quit(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def quit(self, number: int) -> None:
        """End the process, whatever it does; nothing here may wait for a lock of the main thread."""
        if not self._first.acquire(blocking=False):
            return  # the handler and the thread that listens see the same signal
        with suppress(OSError):  # nobody reads it any more
            os.write(2, f"{self._name}: {signal.Signals(number).name} while it starts: it ends\n".encode())
        for folder in tuple(self._folders):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else self._code)

    def listen(self, reader: socket.socket) -> None:
        """Read the numbers of signals, and act while this is their handler."""
        while data := reader.recv(1):
            if signal.getsignal(data[0]) == self.on_signal and not self.is_over:
                self.quit(data[0])

    @contextmanager
    def deleting(self, folder: Path) -> Iterator[None]:
        """See `deleted_on_quit`."""
        self._folders.add(folder)
        try:
            yield
        finally:
            self._folders.discard(folder)


_start: _Start | None = None


def quit_on_signals(name: str, *, code: int = 0) -> None:
    """From now on SIGTERM and SIGINT end this process at once; main thread only.

    Args:
        name: of the service, for people.
        code: exit code after SIGTERM; after SIGINT it is 130.
    """
    global _start
    _start = start = _Start(name, code)
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # a handler must never block
    threading.Thread(target=start.listen, args=(reader,), name="start-signals", daemon=True).start()
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, start.on_signal)


def quit_if_starting(number: int) -> None:
    """For a handler of one's own that is installed before the start is over: end the process, if it still starts."""
    if _start is not None and not _start.is_over:
        _start.quit(number)


def start_is_over() -> None:
    """From now on SIGTERM does nothing where no other handler is installed: the process ends already, with the code
    that it has earned. SIGINT is KeyboardInterrupt again."""
    if _start is not None:
        _start.is_over = True


@contextmanager
def deleted_on_quit(folder: Path) -> Iterator[None]:
    """The folder is deleted if the process ends at once within the block; who opens the block deletes it otherwise."""
    if _start is None:
        yield
        return
    with _start.deleting(folder):
        yield
