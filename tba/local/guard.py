"""The guard: a small process that kills the children of `tba run`, and the programs that `tba setup` and
`tba data prepare` start, when their parent dies, even by kill -9.

    supervisor --(pipe: "+PID" started, "-PID" ended)--> guard --(at end of file: SIGKILL)--> process groups

The kernel closes the pipe when the supervisor dies, whatever killed it; the guard waits for nothing else. Chosen over
PR_SET_PDEATHSIG because it works on every POSIX system, needs no code between fork and exec, does not depend on which
thread started a child, and reaches whole process groups (Redis, worker pools), not only direct children. The guard
also holds the run folder's lock, so that nobody can resume the run before the last child is gone. SIGKILL is enough:
everything here survives it by design (docs/chaos.md).

This file runs as a script in an isolated interpreter (`python -I -S guard.py`): it imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

CLOSE_TIMEOUT_S = 5.0


class Guard:
    """The supervisor's end of the pipe.

    Args:
        lock_fd: descriptor of the run folder's lock, which the guard keeps open as well; None: there is none.
    """

    def __init__(self, lock_fd: int | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            pass_fds=() if lock_fd is None else (lock_fd,),
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """A child started, as leader of its own process group.

        Raises:
            OSError: the guard is gone.
        """
        self._write(f"+{pid}\n")

    def discard(self, pid: int) -> None:
        """The process group of a child is gone; its number may be used again by others.

        Raises:
            OSError: the guard is gone.
        """
        self._write(f"-{pid}\n")

    def close(self) -> None:
        """Close the pipe: the guard kills what is left and ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()


def kill_groups_at_end(lines: Iterable[bytes]) -> None:
    """Follow the pipe until its end, then kill every process group that is still on the list."""
    groups: set[int] = set()
    for line in lines:
        pid = int(line[1:])
        if line.startswith(b"+"):
            groups.add(pid)
        else:
            groups.discard(pid)
    for pid in groups:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kill_groups_at_end(sys.stdin.buffer)
