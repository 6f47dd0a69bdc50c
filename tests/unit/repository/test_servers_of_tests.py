"""The servers of tests leave nothing behind when the process that tests is killed."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.s3_server import NEW_S, remove_dead_sockets
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


def test_sockets_where_nobody_listens_are_removed(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"seaweedfs-{name}-1.sock" for name in ("dead", "live", "new")}
    with socket.socket(socket.AF_UNIX) as live:
        for name, path in paths.items():
            with socket.socket(socket.AF_UNIX) as bound:
                (live if name == "live" else bound).bind(str(path))
            made_s = path.stat().st_mtime - (0 if name == "new" else 2 * NEW_S)
            os.utime(path, (made_s, made_s))
        live.listen()
        remove_dead_sockets(tmp_path)
    assert {name for name, path in paths.items() if path.exists()} == {"live", "new"}
