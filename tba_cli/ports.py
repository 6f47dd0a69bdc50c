"""Choose free ports of this machine, and say which process has taken a port."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tba.errors import ConfigError
from tba.tls import address

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class PortRequest:
    """An address that a child will listen on. `key` is the recipe key to name in an error; port 0 means any."""

    key: str
    host: str
    port: int


def choose_ports(requests: Sequence[PortRequest]) -> list[int]:
    """Return a free port for every request, all different.

    Another process may take one before the child does; the child then fails with the sentence of tba/server/serve.py.

    Raises:
        ConfigError: a port is in use (names the process), or the address is not one of this machine.
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
                f"port {request.port} ({request.key}) is in use by {port_owner(request.port)}; "
                f"end that process, or choose a free port with --set {request.key}=0"
            ) from None
        where = f"{address(request.host, request.port)} ({request.key})"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from None
    return int(listener.getsockname()[1])


def port_owner(port: int) -> str:
    """Return who listens on a TCP port, by /proc: `process 123 (redis-server ...)`, else `another process`."""
    inodes = _listening_inodes(port)
    for entry in Path("/proc").glob("[0-9]*") if inodes else ():
        if _links(entry / "fd") & inodes:
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                break
            return f"process {entry.name} ({command[:80]})"
    return "another process"


def _links(folder: Path) -> set[str]:
    """Return the targets of the links in a folder, as far as they can be read."""
    links: set[str] = set()
    with suppress(OSError):  # the process ended, or belongs to another user
        for link in os.listdir(folder):
            with suppress(OSError):  # closed in the meantime
                links.add(os.readlink(folder / link))
    return links


def _listening_inodes(port: int) -> set[str]:
    """Return the `socket:[inode]` links of the sockets that listen on `port` (columns of proc_net_tcp(5))."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, rows):
            if columns[3] == _LISTEN and int(columns[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{columns[9]}]")
    return inodes
