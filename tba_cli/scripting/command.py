"""Run a `tba` command as a child process, which handles signals, logs and the cleanup of runs itself.

So it works under a running event loop (Jupyter) too, and an interrupt reaches it only through `Command.interrupt`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from tba.errors import ChildError, ConfigError, TbaError
from tba_cli.child_processes import PIPED
from tba_cli.orphan_reaper import OrphanReaper

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
CLOSE_TIMEOUT_S = 60.0
"""Seconds that a closed command has to stop its processes and delete temporary files."""
TAIL_LINES = 20
ERROR = "error: "


class Command:
    """One running command. It ends with this process, even if this process is killed.

    Args:
        words: the words after `tba`.
        on_error_line: called in a thread with each line of stderr, except for the error that ends the command.
        import_folders: put in front of PYTHONPATH, for the command and for the services that it starts.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        on_error_line: Callable[[str], None] = lambda _: None,
        import_folders: Sequence[str] = (),
    ) -> None:
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([*import_folders, *([before] if before else [])])
        self._reaper = OrphanReaper()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tba_cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **PIPED, **({"PYTHONPATH": path} if path else {})},
            # the Ctrl-C of a terminal, or of Jupyter, must reach this process alone
            start_new_session=True,
        )
        self._reaper.add(self._process.pid)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.last_lines: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines of stdout that `next_line` has read."""
        self._on_error_line = on_error_line
        self._reader = threading.Thread(target=self._read_errors, name="stderr of tba", daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Whether the command has not ended."""
        return self._process.poll() is None

    def next_line(self) -> str:
        """Wait for the next line of stdout, and return it; an empty text means that there are no more."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.last_lines.append(line)
        return line

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does: the first one stops a run cleanly, the second at once."""
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        code = self._process.wait()
        # a process that it has left behind may hold the pipe
        self._reader.join(timeout=1.0)
        return code

    def failure(self, code: int) -> TbaError:
        """Return the command's own error: a ChildError for exit code 1 or a signal, else a ConfigError."""
        said = next((line.removeprefix(ERROR) for line in reversed(self._tail) if line.startswith(ERROR)), None)
        text = said or " | ".join(self._tail) or f"tba ended with exit code {code} and said nothing"
        return ChildError(text) if code == EXIT_FAILED or code < 0 else ConfigError(text)

    def close(self) -> None:
        """Send SIGTERM, wait up to `CLOSE_TIMEOUT_S`, then kill the command; end all processes that it has left."""
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(timeout=1.0)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        # the process group may live on where the leader was killed; the reaper ends it
        self._reaper.close()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.rstrip("\n")
            self._tail.append(text)
            if not text.startswith(ERROR):
                self._on_error_line(text)
