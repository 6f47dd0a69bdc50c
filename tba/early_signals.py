"""SIGTERM and SIGINT while a service starts: the process ends at once, with its exit code and one line.

A start may take minutes: torch is imported, a model is loaded, an index is rebuilt. Nothing of that needs an orderly
end, since everything here survives `kill -9` at any moment.

A process calls `quit_on_signals` first, before it imports anything heavy; so this module imports the standard library
alone. Services install handlers of their own later, and this one does nothing while those are installed.

An init process (`tini`, `init: true`) does not replace this module. It forwards the signal, and the default action
would end a service with 143 and not 0, without a line, and leave the folders of `delete_on_quit` behind. `tba run` and
Kubernetes start services without one.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

EXIT_STOPPED = 143
"""Exit code of a trainer that SIGTERM stopped before the run was over: 128 + 15, as in a shell. A Job must not count it
as success."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + 2, as in a shell."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Start:
    """The state of this process while it starts.

    Args:
        name: name of the service, for people.
        code: exit code after SIGTERM.
    """

    def __init__(self, name: str, code: int) -> None:
        self._name, self._code = name, code
        self._folders: set[Path] = set()
        self._first = threading.Lock()
        self.is_over = False

    def on_signal(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal."""
        if not self.is_over:
            self.quit(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def quit(self, number: int) -> None:
        """End the process, whatever it does."""
        # nothing here may wait for a lock of the main thread, which may hold it for ever
        if not self._first.acquire(blocking=False):
            return  # the handler and the thread that listens see the same signal
        with suppress(OSError):  # stderr is closed
            os.write(2, f"{self._name}: {signal.Signals(number).name} while it starts: it ends\n".encode())
        for folder in tuple(self._folders):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else self._code)

    def listen(self, reader: socket.socket) -> None:
        """Read the numbers of signals, and quit while this is their handler.

        Runs in a thread: the main thread may be deep in a library, where no Python handler runs.
        """
        while data := reader.recv(1):
            if signal.getsignal(data[0]) == self.on_signal and not self.is_over:
                self.quit(data[0])

    @contextmanager
    def delete_on_quit(self, folder: Path) -> Iterator[None]:
        """See `delete_on_quit`."""
        self._folders.add(folder)
        try:
            yield
        finally:
            self._folders.discard(folder)


_start: _Start | None = None


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
        name: of the service, for people.
        code: exit code after SIGTERM; after SIGINT it is 130.
    """
    global _start
    open_streams()
    _start = start = _Start(name, code)
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # a handler must never block
    threading.Thread(target=start.listen, args=(reader,), name="start-signals", daemon=True).start()
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, start.on_signal)


def quit_if_starting(number: int) -> None:
    """End the process if it still starts; for another handler that is installed before the start is over."""
    if _start is not None and not _start.is_over:
        _start.quit(number)


def mark_started() -> None:
    """End the start: SIGTERM does nothing from now on unless another handler is installed, and SIGINT is
    KeyboardInterrupt again."""
    if _start is not None:
        _start.is_over = True


@contextmanager
def delete_on_quit(folder: Path) -> Iterator[None]:
    """Delete the folder if the process ends at once within the block; in every other case the caller deletes it."""
    if _start is None:
        yield
        return
    with _start.delete_on_quit(folder):
        yield
