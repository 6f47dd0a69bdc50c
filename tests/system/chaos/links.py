"""A link between two components: a TCP proxy of our own that can be cut, made deaf, slowed down, or reset half-way.

A direction is `to` (what the client sends to the service) or `from` (the answers). While a direction is deaf its bytes
are held, not lost, as TCP itself would send them again after a real outage; connections that are opened meanwhile are
accepted by this machine's kernel, where a real network would let them time out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Literal

Mode = Literal["open", "cut", "deaf", "deaf-to", "deaf-from", "slow", "half-to", "half-from"]
FAULTS: tuple[Mode, ...] = ("cut", "deaf", "deaf-to", "deaf-from", "slow", "half-to", "half-from")
CHUNK_BYTES = 64 * 1024
SLOW_S = 0.4
"""Delay of every piece of data, each way, while a link is slow."""
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
Direction = Literal["to", "from"]


class Link:
    """Forwards a loopback port to another one. All methods but `mode` run on the loop that it was started on."""

    def __init__(self, name: str, target_port: int) -> None:
        self.name = name
        self.port = 0
        self.num_connections = self.num_bytes = 0
        self._target_port = target_port
        self._mode: Mode = "open"
        self._changed = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def mode(self) -> Mode:
        return self._mode

    async def start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.port = server.sockets[0].getsockname()[1]

    async def set(self, mode: Mode) -> None:
        """Begin or end a fault. A cut resets every connection at once, and each one that is opened meanwhile."""
        self._mode = mode
        self._changed.set()
        self._changed = asyncio.Event()
        if mode == "cut":
            for writer in list(self._open):
                reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        service, whole = None, False
        self._open.add(writer)
        try:
            if self._mode == "cut":
                return
            there, service = await asyncio.open_connection("127.0.0.1", self._target_port, limit=CHUNK_BYTES)
            self._open.add(service)
            ways = (self._pump(reader, service, "to"), self._pump(there, writer, "from"))
            async with asyncio.TaskGroup() as both:
                for way in ways:
                    both.create_task(way)
            whole = True
        except* OSError:  # the port is closed, or one side is gone: the other one sees the same
            pass
        finally:
            for end in (writer, service):
                if end is not None:
                    self._open.discard(end)
                    end.close() if whole else reset(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction) -> None:
        """One direction, until its end or a reset, which ends the other direction too."""
        while data := await reader.read(CHUNK_BYTES):
            while self._mode in ("deaf", f"deaf-{way}"):
                await self._changed.wait()
            if self._mode == "slow":
                await asyncio.sleep(SLOW_S)
            if self._mode == f"half-{way}":
                writer.write(data[: len(data) // 2])
                await writer.drain()
                raise ConnectionResetError("reset half-way by the link")
            writer.write(data)
            self.num_bytes += len(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    writer.transport.abort()
