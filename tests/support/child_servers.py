"""Servers of tests that end when the process of the test does, even when that is killed."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from typing import Any

from tba_cli.orphan_reaper import OrphanReaper


@functools.cache
def _reaper() -> OrphanReaper:
    return OrphanReaper()


def start_server(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, with the options of Popen; `kill_server` ends it."""
    process = subprocess.Popen(words, start_new_session=True, **options)
    _reaper().add(process.pid)
    return process


def kill_server(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL, as a crash does it, if it still runs."""
    process.kill()
    process.wait(timeout=30)
    _reaper().discard(process.pid)
