"""The pool's handle of one worker process: its current job, the CPU time of that job, and the end of the process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec

from tba_reward.child_messages import LENGTH, Reply
from tba_reward.process_pool.job import Job
from tba_reward.scorer import Outcome

EXIT_S = 1.0
"""Seconds that a worker may take to exit after its socket has closed; then it is killed."""
EXIT_POLL_S = 0.005
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HAS_PROC = Path("/proc/self/stat").exists()
_DECODER = msgspec.msgpack.Decoder(Reply)


class WorkerHandle(asyncio.Protocol):
    """One worker, which does one job at a time, item by item or all at once.

    Args:
        max_memory_bytes: its address-space limit; None: no limit.
        on_reply: called with the worker, its job and the outcomes of the job's next items.
        on_lost: called with the worker when the socket has closed.
    """

    def __init__(
        self,
        max_memory_bytes: int | None,
        *,
        on_reply: Callable[[WorkerHandle, Job, list[Outcome]], None],
        on_lost: Callable[[WorkerHandle], None],
    ) -> None:
        self.loaded: set[int] = set()
        """Numbers of the rules that it has loaded."""
        self.job: Job | None = None
        self.since_s = 0.0
        """Event loop time at which it began its current item, batch or load."""
        self.num_scored = 0
        """Number of its replies to jobs that score items."""
        self.is_slow = False
        """Whether its job is slow, so that another worker takes its place."""
        self.is_late = False
        """Whether its job was over its limit at the last check."""
        self._on_reply, self._on_lost = on_reply, on_lost
        self._is_given_up = False
        """Whether it was killed or is lost; then the callbacks are no longer called."""
        self._max_memory_bytes = max_memory_bytes
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._pid: int | None = None
        """Process id of the worker, a child of its guard `_process`; None before the first reply."""
        self._cpu_before_s = 0.0
        """CPU time that the worker had used when it sent its last reply."""

    async def start(self) -> None:
        """Start the process and connect to it.

        Raises:
            OSError: there are too many processes, or there is no memory.
        """
        if self._is_given_up:
            return
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                name, memory = "tba_reward.process_pool.worker_main", str(self._max_memory_bytes or 0)
                # workers share the cores: one thread in each library
                threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                path = os.pathsep.join(part or os.getcwd() for part in sys.path)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", name, str(theirs.fileno()), memory, str(os.getpid())],
                    env={**os.environ, **threads, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # a rule that prints writes to the log
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for the service, which drains
                )
            await self._loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise

    @property
    def is_idle(self) -> bool:
        """Whether it is connected and has no job."""
        return self.job is None and self._transport is not None and not self._is_given_up

    def submit(self, job: Job) -> None:
        """Send a job."""
        assert self._transport is not None
        self.job, self.since_s = job, self._loop.time()
        self._transport.write(job.frame)

    def cpu_s(self) -> float:
        """Return the CPU time of its current item or batch; wall-clock time before its first reply or without /proc."""
        if self._pid is None or not _HAS_PROC:
            # the deadline is wall-clock time, as is that of a load
            return self._loop.time() - self.since_s
        with suppress(OSError, IndexError, ValueError):  # it has ended, which its socket says
            fields = Path(f"/proc/{self._pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            return max(0.0, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S - self._cpu_before_s)
        return 0.0

    def ask_to_kill(self) -> None:
        """Ask its guard (worker_main.py) to kill it and its children, and stop all callbacks. Call `end` afterwards."""
        self._is_given_up = True
        if self._transport is not None:
            self._transport.abort()
        self._ask_guard()

    async def end(self) -> int | None:
        """Wait until the process and everything that it has started are gone.

        Returns:
            Its exit code, negative for a signal; None if it was not started, or had to be killed after EXIT_S.
        """
        if self._process is None:
            return None
        is_killed, late_s = False, self._loop.time() + EXIT_S
        # WNOWAIT leaves the zombie: its pid cannot be another process's yet
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            # a rule may close the socket and go on
            if self._loop.time() > late_s and not is_killed:
                is_killed = True
                self._ask_guard()
            await asyncio.sleep(EXIT_POLL_S)
        code = self._process.wait()
        return None if is_killed else code

    # -- called by asyncio ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, which shows that the worker is connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's class
        if self._is_given_up:  # it was killed while it connected
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read the replies to its job, set the outcomes, and call `on_reply`."""
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            reply = _DECODER.decode(self._received[LENGTH.size : end])
            del self._received[:end]
            job = self.job
            # only the reply to its job is one
            if not self._is_given_up and job is not None and reply.number == job.number:
                self._cpu_before_s, self._pid = reply.cpu_s, reply.pid
                self.is_late = self.is_slow = False
                self.num_scored += not job.is_load
                began_s, self.since_s = self.since_s, self._loop.time()
                job.took_s = self.since_s - began_s
                job.settle(reply.outcomes)
                if job.is_done:
                    self.job = None
                self._on_reply(self, job, reply.outcomes)

    def connection_lost(self, exc: Exception | None) -> None:
        """Call `on_lost`, unless the pool itself closed the connection."""
        self._transport = None
        if not self._is_given_up:
            self._is_given_up = True
            self._on_lost(self)

    def _ask_guard(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
