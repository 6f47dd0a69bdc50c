"""Start uvicorn on an address that is really free, with TLS where the recipe has a certificate, and never without
tokens beyond loopback."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE

from tba.config.tls import TlsSection
from tba.errors import ConfigError
from tba.logs import get_logger
from tba.loopback import is_loopback
from tba.service.certificate import Certificate
from tba.service.memory import keep_freed_memory
from tba.service.protocol import BoundedHttpProtocol
from tba.starting import quit_if_starting, start_is_over
from tba.tokens import TokensFile

HANDSHAKE_TIMEOUT_S = 10.0
"""A client that connects has this long for the TLS handshake."""
SHUTDOWN_TIMEOUT_S = 5.0
"""And this long to agree that the connection ends."""
log = get_logger("serve")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use by another process; stop that one or choose another port "
                "(port 0 lets `tba run` pick a free one)"
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


class Server(uvicorn.Server):
    """uvicorn's server over one bound socket; with a certificate it speaks TLS alone and follows the files.

    Args:
        config: of uvicorn.
        certificate: what it shows, or None for plain HTTP.
        start: awaited before anything else; what it raises ends the server, without the traceback of uvicorn.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        certificate: Certificate | None = None,
        start: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._certificate = certificate
        self._start = start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then listen; what uvicorn does, and a deadline for TLS handshakes, which it does not pass on."""
        if self._start is not None:
            await self._start()
        if self._certificate is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)

        def protocol() -> asyncio.Protocol:
            return BoundedHttpProtocol(self.config, self.server_state, self.lifespan.state)

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                protocol,
                sock=sock,
                ssl=self._certificate.context,
                backlog=self.config.backlog,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
            for sock in sockets or []
        ]
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT; before anything is served, where uvicorn would wait for the end of the start, at once."""
        if not self.started:
            quit_if_starting(sig)
        start_is_over()  # uvicorn raises the signal again when everything is closed
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: look for a renewed certificate now and then."""
        if self._certificate is not None:
            self._certificate.refresh()
        return await super().on_tick(counter)


def serve(
    app: FastAPI,
    *,
    host: str,
    port: int,
    tokens: Mapping[str, str] | TokensFile | None,
    tls: TlsSection | None = None,
    start: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        start: awaited in the loop of the server, before it serves; what it raises is raised here.

    Raises:
        ConfigError: no tokens on an address that is not loopback, the address cannot be bound, or the certificate
            cannot be used.
    """
    if tokens is None and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host} without tokens: anyone could write to this run; "
            "set auth.tokens_file, or listen on 127.0.0.1"
        )
    certificate = None
    if tls is not None and tls.cert_file is not None and tls.key_file is not None:
        certificate = Certificate(tls.cert_file, tls.key_file)
    keep_freed_memory()
    sock = bind(host, port)
    log.info("listening", host=host, port=sock.getsockname()[1], tls=certificate is not None)
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=10,
    )
    Server(config, certificate, start).run(sockets=[sock])
