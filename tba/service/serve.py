"""Start uvicorn on an address that is really free, and never without tokens beyond loopback."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping

import uvicorn
from fastapi import FastAPI

from tba.errors import ConfigError
from tba.logs import get_logger
from tba.service.memory import keep_freed_memory
from tba.service.protocol import BoundedHttpProtocol

log = get_logger("serve")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def serve(app: FastAPI, *, host: str, port: int, tokens: Mapping[str, str] | None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: no tokens on an address that is not loopback, or the address cannot be bound.
    """
    if tokens is None and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host} without tokens: anyone could write to this run; "
            "set auth.tokens_file, or listen on 127.0.0.1"
        )
    keep_freed_memory()
    sock = bind(host, port)
    log.info("listening", host=host, port=sock.getsockname()[1])
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        log_level="warning",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=10,
    )
    uvicorn.Server(config).run(sockets=[sock])
