"""Choose free ports of this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tba.errors import ConfigError
from tba.tls import address


@dataclass(frozen=True, slots=True)
class PortRequest:
    """An address that a child will listen on. `key`: the recipe key for error messages. Port 0: any free port."""

    key: str
    host: str
    port: int


def choose_ports(requests: Sequence[PortRequest]) -> list[int]:
    """Return a free port for every request, all different.

    Another process may take a port before the child binds it; the child then fails (tba/server/serve.py).
    """
    # all are bound at once, so that no port is chosen twice, and released for the children at the end
    with ExitStack() as held:
        fixed_first = sorted(range(len(requests)), key=lambda index: requests[index].port == 0)
        ports = {index: _bind(requests[index], held) for index in fixed_first}
    return [ports[index] for index in range(len(requests))]


def _bind(request: PortRequest, held: ExitStack) -> int:
    family = socket.AF_INET6 if ":" in request.host else socket.AF_INET
    listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((request.host, request.port))
        listener.listen()  # two sockets with SO_REUSEADDR may share a port until one listens
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {request.port} ({request.key}) is in use by another process (`ss -ltnp` names it); end that "
                f"process, or choose a free port with --set {request.key}=0"
            ) from None
        where = f"{address(request.host, request.port)} ({request.key})"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from None
    return int(listener.getsockname()[1])
