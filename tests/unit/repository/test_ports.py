"""Two processes that test at the same time."""

from __future__ import annotations

import subprocess
import sys

from tests.support.redis_process import free_port

NUM_PORTS = 500
"""Of about 27,000: two processes that knew nothing of each other would draw nine in common."""


def test_two_processes_are_never_given_one_port():
    program = (
        "import sys; from tests.support.redis_process import free_port;"
        f"print([free_port() for _ in range({NUM_PORTS})], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().strip(b"[]\n").split(b",")))
        ours = {free_port() for _ in range(NUM_PORTS)}
    assert (len(theirs), len(ours), theirs & ours) == (NUM_PORTS, NUM_PORTS, set())
