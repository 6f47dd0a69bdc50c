"""Servers for tests that end with the test's process, even if that process is killed."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tba_cli.orphan_reaper import OrphanReaper


@functools.cache
def _reaper() -> OrphanReaper:
    return OrphanReaper()


def start_server(
    words: Sequence[str], *, log: IO[bytes], env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with its output in a log; `kill_server` ends it."""
    process = subprocess.Popen(words, env=env, stdout=log, stderr=log, cwd=cwd, start_new_session=True)
    _reaper().add(process.pid)
    return process


def kill_server(process: subprocess.Popen[bytes]) -> None:
    """Kill a server with SIGKILL if it still runs, and wait for its end."""
    process.kill()
    process.wait(timeout=30)
    _reaper().discard(process.pid)
