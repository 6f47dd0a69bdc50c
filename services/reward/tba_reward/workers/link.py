"""The service's side of the nursery: starts it, sends it orders, hears from it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from tba_reward.workers.messages import Fork, Frames, FromNursery, Kill, Share, ToNursery, encode

STOP_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16
_DECODER = msgspec.msgpack.Decoder(FromNursery)


class NurseryLink:
    """One nursery process.

    Args:
        max_memory_bytes: address space of one worker; None: no bound.
        on_message: called on the event loop with everything it says.
        on_end: called once when it has died by itself.
    """

    def __init__(
        self,
        *,
        max_memory_bytes: int | None,
        on_message: Callable[[FromNursery], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._frames = Frames()
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tba_reward.workers.nursery", str(theirs.fileno()), str(max_memory_bytes or 0)],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a rule prints belongs into the log
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the service, which drains
            )
        self._control: socket.socket | None = ours
        ours.settimeout(SEND_TIMEOUT_S)
        self._loop.add_reader(ours.fileno(), self._read)

    def fork(self, worker: int, end: socket.socket) -> None:
        """Fork a worker that serves this end of a socket pair."""
        self._send(Fork(worker), [end.fileno()])

    def kill(self, worker: int) -> None:
        """Kill a worker and its process group; its exit is reported."""
        self._send(Kill(worker))

    def share(self, message: Share) -> None:
        """Prepare a rule for all workers to come."""
        self._send(message)

    async def close(self) -> None:
        """End the nursery, and with it all workers."""
        self._hang_up()
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _send(self, message: ToNursery, fds: list[int] | None = None) -> None:
        if self._control is None:
            return
        data = encode(message)
        try:
            sent = socket.send_fds(self._control, [data], fds or [])
            self._control.sendall(data[sent:])
        except OSError:
            self._ended()

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
            self._ended()
            return
        for body in self._frames.feed(data):
            self._on_message(_DECODER.decode(body))

    def _ended(self) -> None:
        if self._control is not None:
            self._hang_up()
            self._loop.call_soon(self._on_end)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            with suppress(OSError):
                self._control.close()
            self._control = None


def _environment() -> dict[str, str]:
    """That of the service; modules are found where the service finds them.

    Libraries start no threads: the nursery forks, and workers share the cores.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    return {**os.environ, **threads, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
