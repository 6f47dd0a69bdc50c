"""A small process that kills the child processes of the command line when their parent dies, even by kill -9.

    supervisor --(pipe: "+PID" started, "-PID" ended)--> reaper --(at end of file: SIGKILL)--> process groups

The kernel closes the pipe when the supervisor dies, whatever killed it; the reaper waits for nothing else. Unlike
PR_SET_PDEATHSIG, this works on every POSIX system and needs no code between fork and exec. It does not depend on the
thread that started a child, and reaches whole process groups (Redis, worker pools). The reaper also holds
the lock of the run folder, so that nobody can resume the run before the last child is gone. SIGKILL is enough:
everything here survives it by design (docs/operations.md).

This file runs as a script in an isolated interpreter (`python -I -S`): it imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

CLOSE_TIMEOUT_S = 5.0


class OrphanReaper:
    """Starts the reaper, and holds the supervisor's end of the pipe to it.

    Args:
        lock_fd: descriptor of the run folder's lock, which the reaper keeps open too; None: there is none.
    """

    def __init__(self, lock_fd: int | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            pass_fds=() if lock_fd is None else (lock_fd,),
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """Tell the reaper that a child has started, as leader of its own process group.

        Raises:
            OSError: the reaper is gone.
        """
        self._write(f"+{pid}\n")

    def discard(self, pid: int) -> None:
        """Tell the reaper that the process group of a child is gone, because another process may get its number.

        Raises:
            OSError: the reaper is gone.
        """
        self._write(f"-{pid}\n")

    def close(self) -> None:
        """Close the pipe, so that the reaper kills the remaining children and ends; wait for its end."""
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


if __name__ == "__main__":
    # only the end of the pipe counts: signals for the whole session reach this process too
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        pid = int(line[1:])
        if line.startswith(b"+"):
            groups.add(pid)
        else:
            groups.discard(pid)
    # the end of the pipe: what is still on the list has lost its parent
    for pid in groups:
        try:
            os.killpg(pid, signal.SIGKILL)
        # the group is gone, or its number belongs to another user by now
        except (ProcessLookupError, PermissionError):
            continue
