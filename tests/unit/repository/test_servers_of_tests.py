"""The servers of tests leave nothing behind when the process that tests is killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waits import DEADLINE_S

STARTS = {
    "redis": "redis = RedisProcess(folder, free_port()); redis.start(); pid = redis.process.pid",
    "s3": "pid = S3Server(folder).launch()",
}
PROGRAM = """
import sys
from pathlib import Path
from tests.support.redis_process import RedisProcess, free_port
from tests.support.s3_server import S3Server
folder = Path(sys.argv[1])
{start}
print(pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", STARTS)
def test_a_server_ends_with_the_process_that_tests(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM.format(start=STARTS[name]), str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tester:
        assert tester.stdout is not None
        server = os.pidfd_open(int(tester.stdout.readline()))
        tester.kill()
    assert select.select([server], [], [], DEADLINE_S)[0], "the server still runs"
    os.close(server)
