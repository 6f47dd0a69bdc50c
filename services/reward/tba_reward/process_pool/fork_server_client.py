"""The service's side of the fork server: start it, send it orders, read its reports."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from tba_reward.process_pool.pool_messages import (
    ForkWorker,
    FrameDecoder,
    FromForkServer,
    KillWorker,
    PreloadRule,
    ToForkServer,
    encode,
)

STOP_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16
_DECODER = msgspec.msgpack.Decoder(FromForkServer)


class ForkServerClient:
    """One fork server process.

    Args:
        max_memory_bytes: address space of one worker; None: no bound.
        on_message: called on the event loop with every message of the server.
        on_end: called once when the server has died by itself.
    """

    def __init__(
        self,
        *,
        max_memory_bytes: int | None,
        on_message: Callable[[FromForkServer], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._frames = FrameDecoder()
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tba_reward.process_pool.fork_server",
                    str(theirs.fileno()),
                    str(max_memory_bytes or 0),
                ],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,  # a rule that prints writes to the log
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the service, which drains
            )
        self._control: socket.socket | None = ours
        # a server that reads nothing for this long, with the socket's buffer full, counts as lost
        ours.settimeout(SEND_TIMEOUT_S)
        self._loop.add_reader(ours.fileno(), self._read)

    def fork(self, worker: int, end: socket.socket) -> None:
        """Fork a worker that serves this end of a socket pair."""
        self._send(ForkWorker(worker), [end.fileno()])

    def kill(self, worker: int) -> None:
        """Kill a worker and its process group; the server reports its exit."""
        self._send(KillWorker(worker))

    def preload(self, message: PreloadRule) -> None:
        """Load a rule for all workers to come."""
        self._send(message)

    async def close(self) -> None:
        """End the server, and with it all workers."""
        self._hang_up()
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _send(self, message: ToForkServer, fds: list[int] | None = None) -> None:
        if self._control is None:
            return
        data = encode(message)
        try:
            # send_fds may take a part only; the descriptors went with its first byte
            sent = socket.send_fds(self._control, [data], fds or [])
            self._control.sendall(data[sent:])
        except OSError:
            self._on_lost()

    def _read(self) -> None:
        if self._control is None:
            return
        try:
            data = self._control.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_lost()
            return
        for body in self._frames.feed(data):
            self._on_message(_DECODER.decode(body))

    def _on_lost(self) -> None:
        if self._control is not None:
            self._hang_up()
            # not at once: the pool may be in the middle of a loop over its workers that called us
            self._loop.call_soon(self._on_end)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            with suppress(OSError):
                self._control.close()
            self._control = None


def _environment() -> dict[str, str]:
    """Return the service's environment for the server, with the same module path and no threads in libraries."""
    # threads do not survive a fork, and workers share the cores
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    return {**os.environ, **threads, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
