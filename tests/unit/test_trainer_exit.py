"""A process of a team ends with its own exit code, whatever the interpreter's teardown would do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.buffer import SERVICE_PATHS

PROGRAM = """
import atexit, os
atexit.register(os.abort)  # as a thread of gloo that wakes too late
print("said before the end", end="")
from tba_trainer.__main__ import exit_process
exit_process(3)
"""


def _end(world_size: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "WORLD_SIZE": world_size, "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS))}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("world_size", "code"), [("2", 3), ("1", -6)])
def test_in_a_team_no_teardown_follows(world_size: str, code: int) -> None:
    done = _end(world_size)
    assert (done.returncode, done.stdout) == (code, "said before the end" if world_size == "2" else done.stdout)
