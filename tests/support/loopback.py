"""HTTP servers of tests on loopback: a quiet handler, and a server in a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Reads and answers whole bodies."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(self, status: int, body: Any = b"", headers: Mapping[str, str] | None = None) -> None:
        """Send bytes, or a JSON document."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "content-length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on stderr."""


class Server(ThreadingHTTPServer):
    """Serves from a thread until `close`; with a context, over TLS."""

    daemon_threads = True

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], port: int = 0, *, context: SSLContext | None = None
    ) -> None:
        super().__init__(("127.0.0.1", port), handler)
        if context is not None:
            # in the thread of a request, or one client holds up all
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()
