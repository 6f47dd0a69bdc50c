"""An application of `create_app` that listens in a thread, to test the server code that all services share."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Depends, Response
from prometheus_client import CollectorRegistry

from tba.server import Authenticator, create_app
from tba.server.serve import Certificate, Server, bind
from tba.tokens import TokensFile
from tests.support.buffer import make_recipe

TLS_FOLDER = Path(__file__).resolve().parents[1] / "data" / "tls"
LARGE_BYTES = 32 * 2**20


class ServedApp:
    """Serves GET /v1/small and /v1/large for searchers, and the routes of every service, within a `with` block."""

    def __init__(
        self,
        tokens: Mapping[str, str] | TokensFile | None = None,
        certificate: Certificate | None = None,
        **settings: Any,
    ) -> None:
        async def ready() -> None:
            return None

        auth = Authenticator(tokens)
        app = create_app(
            title="test",
            recipe=make_recipe(),
            max_body_bytes=2**20,
            auth=auth,
            ready=ready,
            registry=CollectorRegistry(),
        )

        @app.get("/v1/small", dependencies=[Depends(auth.require("searcher"))])
        async def small() -> dict[str, str]:
            return {"status": "ok"}

        @app.get("/v1/large", dependencies=[Depends(auth.require("searcher"))])
        async def large() -> Response:
            return Response(b"x" * LARGE_BYTES)

        self.socket = bind("127.0.0.1", 0)
        self.port: int = self.socket.getsockname()[1]
        self.url = f"{'http' if certificate is None else 'https'}://127.0.0.1:{self.port}"
        self.server = Server(app, certificate, timeout_graceful_shutdown=1, **settings)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def __enter__(self) -> ServedApp:
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(timeout=30)
        self.socket.close()

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def serial_number(self, ca_file: Path) -> str:
        """Open a connection; return the serial number of the certificate that the server presents."""
        context = ssl.create_default_context(cafile=str(ca_file))
        with self.connect() as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
            found = sock.getpeercert()
        assert found is not None
        return str(found["serialNumber"])
