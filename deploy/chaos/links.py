"""Proxy the links between the services of `docker compose`, and inject faults now and then (profile `chaos`).

    python links.py buffer:8700 reward:8701

Listens on the port of each target and forwards to it. Every CHAOS_EVERY_S seconds one link, chosen by CHAOS_SEED, has a
fault for CHAOS_FOR_S seconds: `cut` resets its connections and refuses new ones, `deaf` lets nothing through, `slow`
delays every piece of data. A JSON line reports each begin and end. Uses the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from typing import Literal

Fault = Literal["open", "cut", "deaf", "slow"]
FAULTS: tuple[Fault, ...] = ("cut", "deaf", "slow")
SLOW_S = 0.3
CHUNK_BYTES = 64 * 1024


class Link:
    """Forwards a port to the same port of another host.

    Args:
        target: HOST:PORT.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._fault: Fault = "open"
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self) -> None:
        """Listen for ever."""
        server = await asyncio.start_server(self._accept, "0.0.0.0", self._port)
        await server.serve_forever()

    def set(self, fault: Fault) -> None:
        """Begin a fault, or end it with `open`."""
        self._fault = fault
        if fault == "deaf":
            self._is_open.clear()
        else:
            self._is_open.set()
        if fault == "cut":
            for writer in self._writers:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fault == "cut":
            writer.transport.abort()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there_writer}
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            self._writers -= {writer, there_writer}
            for end in (writer, there_writer):
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._is_open.wait()
                if self._fault == "slow":
                    await asyncio.sleep(SLOW_S)
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()


async def inject_faults(links: list[Link], rng: random.Random, *, every_s: float, for_s: float) -> None:
    """Inject one fault after the other, for ever."""
    while True:
        await asyncio.sleep(every_s)
        link, fault = rng.choice(links), rng.choice(FAULTS)
        link.set(fault)
        report(link.target, fault)
        await asyncio.sleep(for_s)
        link.set("open")
        report(link.target, "open")


def report(target: str, fault: Fault) -> None:
    """Print the begin or the end of a fault as one JSON line."""
    print(json.dumps({"event": "link", "target": target, "fault": fault}), flush=True)


async def main(targets: list[str]) -> None:
    """Serve every link, and inject faults."""
    links = [Link(target) for target in targets]
    rng = random.Random(int(os.environ.get("CHAOS_SEED", "0")))
    every_s, for_s = (float(os.environ.get(name, default)) for name, default in DEFAULTS_S)
    await asyncio.gather(*(link.serve() for link in links), inject_faults(links, rng, every_s=every_s, for_s=for_s))


DEFAULTS_S = (("CHAOS_EVERY_S", "30"), ("CHAOS_FOR_S", "10"))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
