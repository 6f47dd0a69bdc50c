"""A proxy that forwards requests to a service and loses the first answers: what a client sees when a reply is cut."""

from __future__ import annotations

import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class LossyProxy:
    """Serves on a loopback port from a thread, as a context manager.

    Args:
        url: the service.
        num_to_lose: answers that never arrive; the requests do.
    """

    def __init__(self, url: str, *, num_to_lose: int) -> None:
        self.num_to_lose = num_to_lose
        proxy, target = self, urlsplit(url).netloc

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                connection = HTTPConnection(target, timeout=30)
                connection.request("POST", self.path, body, {"content-type": self.headers["content-type"]})
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                if proxy.num_to_lose > 0:
                    proxy.num_to_lose -= 1
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header("content-type", answer.headers["content-type"])
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> LossyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
