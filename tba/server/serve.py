"""Serve an application with uvicorn: with TLS if the recipe has a certificate, and without tokens on loopback only."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tba.config.sections import TlsSection
from tba.early_signals import mark_started, quit_if_starting
from tba.errors import ConfigError
from tba.logs import get_logger
from tba.server.problems import problem_response
from tba.tls import address, is_loopback
from tba.tokens import TokensFile
from tba.watched_file import WatchedFile

MAX_CONNECTIONS = 4096
"""Most connections of one server. A searcher has about four, the trainer two, `tba run` two."""
SPARE_FILES = 256
"""Open files reserved for Redis, the object store, workers and the log."""
BACKLOG = 2048
KEEP_ALIVE_S = 5
"""Seconds without a request after which a connection is closed."""
GRACEFUL_SHUTDOWN_S = 10
MALLOPT_TRIM_THRESHOLD = -1
MALLOPT_MMAP_THRESHOLD = -3
MAX_KEPT_BYTES = 256 * 2**20
MAX_HEAP_BLOCK_BYTES = 32 * 2**20
log = get_logger("serve")


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
        start: awaited in the server's event loop before it serves; its errors are raised here.

    Raises:
        ConfigError: no tokens on an address that is not loopback, the address cannot be bound, or the certificate
            cannot be used.
    """
    if tokens is None and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host} without tokens: anyone could write to this run; "
            "set auth.tokens_file, or listen on 127.0.0.1"
        )
    certificate = Certificate.of(tls)
    # Every request allocates and frees blocks of some 100 KB to some MB. By default each of them is mapped, cleared
    # page by page at first touch, and unmapped again; that costs more than all the work on them (ADR 5). So glibc,
    # where there is one, keeps what is freed for the next request.
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MALLOPT_TRIM_THRESHOLD, MAX_KEPT_BYTES)
        mallopt(MALLOPT_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
    sock = bind(host, port)
    log.info("listening", host=host, port=sock.getsockname()[1], tls=certificate is not None)
    Server(app, certificate, start).run(sockets=[sock])


@asynccontextmanager
async def not_ready(host: str, port: int, *, tls: TlsSection, reason: Callable[[], str]) -> AsyncIterator[None]:
    """Answer HTTP requests while the `with` block waits for another service: 200 for /livez, 503 for all else.

    Args:
        reason: returns the detail of the 503.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_live = scope["path"] == "/livez"
        said = {"status": "ok"}
        problem = problem_response(status=503, slug="not-ready", detail=reason())
        await (JSONResponse(said) if is_live else problem)(scope, receive, send)

    certificate = Certificate.of(tls)
    secure = {} if certificate is None else {"ssl_context_factory": lambda *_: certificate.context}
    quiet: dict[str, Any] = {
        "lifespan": "off",
        "log_config": None,
        "log_level": "warning",
        "access_log": False,
        **secure,
    }
    server = uvicorn.Server(uvicorn.Config(answer, timeout_graceful_shutdown=1, **quiet))
    serving = asyncio.create_task(server.serve(sockets=[bind(host, port)]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


class Server(uvicorn.Server):
    """uvicorn's server with the settings of every service.

    Args:
        certificate: certificate for TLS, which is then the only protocol; None: plain HTTP.
        start: awaited before anything else; its errors end the server, without uvicorn's traceback.
        settings: arguments of uvicorn.Config that override the usual ones.
    """

    def __init__(
        self,
        app: FastAPI,
        certificate: Certificate | None = None,
        start: Callable[[], Awaitable[None]] | None = None,
        **settings: Any,
    ) -> None:
        usual = {
            "http": "httptools",
            "ws": "none",
            "log_level": "warning",
            "log_config": None,
            "access_log": False,
            "backlog": BACKLOG,
            "limit_concurrency": max_connections(),
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": GRACEFUL_SHUTDOWN_S,
        }
        if certificate is not None:
            usual["ssl_context_factory"] = lambda *_: certificate.context
        super().__init__(uvicorn.Config(app, **{**usual, **settings}))
        self._certificate = certificate
        self._start = start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Await `start`, then listen."""
        if self._start is not None:
            await self._start()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and SIGINT: exit at once while the service is starting, later shut down gracefully."""
        if not self.started:  # uvicorn would wait for the end of the start
            quit_if_starting(sig)
        mark_started()  # uvicorn raises the signal again when everything is closed
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Reload a renewed certificate; uvicorn calls this ten times a second."""
        if self._certificate is not None:
            self._certificate.refresh()
        return await super().on_tick(counter)


class Certificate:
    """A TLS context that reloads its certificate when the files change; new connections get the new certificate.

    If certificate and key do not match after a change, that is logged, and the old pair stays in use.

    Raises:
        ConfigError: the files cannot be read, or certificate and key do not match.
    """

    def __init__(self, cert_file: str, key_file: str) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.options |= ssl.OP_NO_RENEGOTIATION

        def load() -> None:
            # somebody may be half-way through writing the pair: one that does not fit would leave a context without any
            _load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert_file, key_file)
            _load_into(self.context, cert_file, key_file)

        self._watched = WatchedFile([cert_file, key_file], load, what=f"tls.cert_file {cert_file}")

    @classmethod
    def of(cls, tls: TlsSection | None) -> Certificate | None:
        """Return the certificate of the recipe's `tls` section; None if it has none."""
        if tls is None or tls.cert_file is None or tls.key_file is None:
            return None
        return cls(tls.cert_file, tls.key_file)

    def refresh(self) -> None:
        """Load the files again if they have changed; this is checked at most once a second."""
        _ = self._watched.value


def _load_into(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    for name, path in (("cert_file", cert_file), ("key_file", key_file)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"tls.{name} {path} cannot be read: {error.strerror}") from None
    try:
        # without a passphrase of its own, OpenSSL would ask for one on the terminal
        context.load_cert_chain(cert_file, key_file, password=lambda: b"")
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls.cert_file {cert_file} and tls.key_file {key_file} are not a matching PEM certificate and key "
            f"without a passphrase: {error.reason or error}"
        ) from None


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on host and port; `::` accepts IPv6 and IPv4. Raise ConfigError if it cannot."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # a kernel without IPv6: every address that there is
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY for sockets that say they are TCP, not for those of protocol 0; without it every answer,
    # which is two writes, waits for the client's delayed acknowledgement, some 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if host == "::":  # IPv4 too, whatever the default of this machine is
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use by another process; stop that one or choose another port "
                "(port 0 lets `tba run` pick a free one)"
            ) from None
        raise ConfigError(f"cannot listen on {address(host, port)}: {error.strerror}") from None
    return sock


def max_connections() -> int:
    """Raise this process's limit on open files for MAX_CONNECTIONS, as far as the system allows. Return the number of
    connections that a server may have under the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(16, soft - SPARE_FILES))
