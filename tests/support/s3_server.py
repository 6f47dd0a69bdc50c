"""The bundled S3 server on a free loopback port, and a proxy before it that breaks requests on purpose."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from boto3.session import Session
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from tests.support import loopback
from tests.support.child_servers import kill_server, start_server
from tests.support.redis_process import free_port

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tba-test", "AWS_SECRET_ACCESS_KEY": "tba-test-secret-0123"}
READ_ONLY = {"AWS_ACCESS_KEY_ID": "tba-test-read", "AWS_SECRET_ACCESS_KEY": "tba-test-read-secret"}
PROGRAM = Path(__file__).parents[2] / "deploy/objectstore/serve.py"
SOCKETS, NEW_S = Path("/tmp"), 60.0
"""The folder of SeaweedFS's sockets, which no option changes; a socket's server listens within so many seconds."""
CODES = {302: "Found", 403: "AccessDenied", 409: "ConditionalRequestConflict", 503: "SlowDown"}


class S3Server:
    """deploy/objectstore/serve.py as a child process, with the keys of CREDENTIALS and READ_ONLY.

    `without` names a variable to leave out. Objects are files below `folder`, so they survive `kill`."""

    def __init__(self, folder: Path, *, without: str | None = None) -> None:
        self.port = free_port()
        self._environ = store_environ(folder, self.port)
        self._environ.pop(without or "", None)
        self.url = f"http://127.0.0.1:{self.port}"
        self.ports = (str(self.port), *self._environ["INTERNAL_PORTS"].split(","))
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> int:
        """Start the server and return its process id without waiting for it."""
        remove_dead_sockets()
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            words = (sys.executable, str(PROGRAM))
            self._process = start_server(words, log=log, env=self._environ, cwd=self._folder)
        return self._process.pid

    def start(self, *, timeout_s: float = 180.0) -> None:
        """Start the server and wait until it answers."""
        self.launch()
        assert self._process is not None
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            assert self._process.poll() is None, f"the S3 server died: {(self._folder / 'log').read_text()[-2000:]}"
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/healthz")
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.1)
        raise AssertionError(f"the S3 server did not answer on port {self.port} within {timeout_s} s")

    def kill(self) -> None:
        """Kill the server with SIGKILL, and delete the sockets that it leaves in SOCKETS."""
        if self._process is not None:
            kill_server(self._process)
            self._process = None
            for port in self.ports:
                for path in SOCKETS.glob(f"seaweedfs-*-grpc-{port}.sock"):
                    path.unlink(missing_ok=True)

    def create_bucket(self, name: str) -> None:
        config = Config(s3={"addressing_style": "path"})
        client = Session().client("s3", endpoint_url=self.url, region_name="us-east-1", config=config)
        client.create_bucket(Bucket=name)
        client.close()


@contextmanager
def s3_with_bucket(folder: Path, bucket: str) -> Iterator[S3Server]:
    """Run a server with a bucket for the block, with its keys in the environment."""
    server = S3Server(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        try:
            server.start()
            server.create_bucket(bucket)
            yield server
        finally:
            server.kill()


def store_environ(folder: Path, port: int) -> dict[str, str]:
    """Return the environment for PROGRAM: it listens on `port` on loopback, and stores objects below `folder`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {
        **inherited,
        "PORT": str(port),
        "INTERNAL_PORTS": ",".join(str(free_port()) for _ in range(7)),
        "BIND_HOST": "127.0.0.1",
        "DATA_DIR": str(folder / "objects"),
        "TMPDIR": str(folder),
        **{name.replace("AWS_", "READ_WRITE_"): value for name, value in CREDENTIALS.items()},
        **{name.replace("AWS_", "READ_ONLY_"): value for name, value in READ_ONLY.items()},
    }


def remove_dead_sockets(folder: Path = SOCKETS) -> None:
    """Delete the sockets on which no server listens: the servers were killed together with their test process. Sockets
    younger than NEW_S stay, because their server may not listen yet."""
    for path in folder.glob("seaweedfs-*.sock"):
        with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as connection:
            if time.time() - path.stat().st_mtime > NEW_S:
                try:
                    connection.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()


class FaultyProxy(loopback.Server):
    """Forwards requests to an S3 server; each of the next requests gets one fault from the list `faults`.

    An int: answer this status without forwarding. "lose": forward, then close the connection without an answer.
    "cut": forward, then send half of the body. "stall": forward, then send nothing for STALL_S. "trickle": forward,
    then send the body in TRICKLE_PARTS parts over TRICKLE_S. None: no fault, as for requests beyond the list.
    `drop_headers` are not forwarded. `counts` counts the faults so far.
    """

    STALL_S, TRICKLE_S, TRICKLE_PARTS = 3.0, 3.0, 50

    def __init__(self, target_port: int) -> None:
        self.faults: list[int | str | None] = []
        self.counts: Counter[int | str | None] = Counter()
        self.drop_headers: set[str] = set()
        self.num_requests = 0
        self._target_port = target_port
        super().__init__(self._handler())

    def _forward(self, request: BaseHTTPRequestHandler) -> tuple[int, list[tuple[str, str]], bytes]:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in request.headers.items() if k.lower() not in {"expect", *self.drop_headers}}
        if self.drop_headers:  # they were signed
            signed = AWSRequest(request.command, f"http://{headers['Host']}{request.path}", headers, body)
            del signed.headers["Authorization"]
            keys = Credentials(CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
            S3SigV4Auth(keys, "s3", "us-east-1").add_auth(signed)
            headers = dict(signed.headers.items())
        connection = http.client.HTTPConnection("127.0.0.1", self._target_port, timeout=30)
        try:
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                self.close_connection = True
                proxy.num_requests += 1
                fault = proxy.faults.pop(0) if proxy.faults else None
                if fault is not None:
                    proxy.counts[fault] += 1
                if isinstance(fault, int):
                    self.rfile.read(int(self.headers.get("Content-Length") or 0))
                    code = CODES[fault]
                    text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
                    self._answer(fault, [("Content-Type", "application/xml")], text, len(text))
                    return
                status, headers, body = proxy._forward(self)
                if fault == "stall":
                    time.sleep(proxy.STALL_S)  # the client has given up by then
                elif fault == "trickle":
                    self._answer(status, headers, b"", len(body))
                    with suppress(OSError):
                        for number in range(proxy.TRICKLE_PARTS):
                            time.sleep(proxy.TRICKLE_S / proxy.TRICKLE_PARTS)
                            begin, end = (k * len(body) // proxy.TRICKLE_PARTS for k in (number, number + 1))
                            self.wfile.write(body[begin:end])
                elif fault != "lose":
                    length = len(body)
                    if self.command == "HEAD":
                        length = int(next(value for name, value in headers if name.lower() == "content-length"))
                    self._answer(status, headers, body[: len(body) // 2] if fault == "cut" else body, length)

            def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(length))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body)

        return Handler
