"""The health check of the images, against a real server on loopback."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tba.health import readiness_problem


@contextmanager
def service(status: int, body: bytes) -> Iterator[int]:
    """A service whose /readyz answers this; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = status if self.path == "/readyz" else 404
            self.send_response(found)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tba.health", *arguments], capture_output=True, text=True)


def test_a_ready_service_is_well():
    with service(200, b"{}") as port:
        assert readiness_problem(port) is None
        assert check(str(port)).returncode == 0


def test_one_that_is_not_ready_says_why():
    with service(503, b'{"detail": "Redis does not answer"}') as port:
        answer = check(str(port))
        assert answer.returncode == 1
        assert answer.stderr == f"error: port {port} answers 503: Redis does not answer\n"


def test_one_that_does_not_listen_is_not_well():
    with service(200, b"") as port:
        pass
    assert f"nothing answers on port {port}" in str(readiness_problem(port))


def test_without_a_port_or_a_recipe_the_usage_says_so():
    answer = check()
    assert answer.returncode == 2
    assert "give either a port or --config" in answer.stderr


def test_an_explained_error_of_the_recipe_is_shown(tmp_path):
    answer = check("--config", str(tmp_path / "missing.toml"))
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: ")
    assert "missing.toml" in answer.stderr
