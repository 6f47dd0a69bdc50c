"""One worker process as the pool sees it: the jobs that it holds, and the deadline of the first one.

The deadline of an item is CPU time of the process, so that a busy machine fails no item that would have been scored.
The second limit is wall-clock time, for an item that waits and computes nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Protocol, cast

import msgspec

from tba_reward.process_pool.job import Job
from tba_reward.process_pool.pool_messages import FrameDecoder, Reply

LATE_REPLY_S = 0.05
"""Grace after a deadline: the reply may lie in the socket already, if the event loop was busy."""
WALL_SLACK_S = 25.0
"""In wall-clock time an item may take this much longer than its deadline. It is less than what a request is given
beyond its slowest scorer's deadline (`RewardSection.request_deadline_s`)."""
CPU_POLL_S = 0.02
"""Pause between two looks at the CPU time of a worker that is nearly due."""
ABANDONED_S = 0.5
"""An item that nobody waits for any more may take this long before its worker is killed."""
EXIT_S = 1.0
"""From the report of its exit to the end of its socket, which brings the last replies."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HAS_PROC = Path("/proc/self/stat").exists()
_DECODER = msgspec.msgpack.Decoder(Reply)


class WorkerCallbacks(Protocol):
    """The events of a worker, as the pool takes them."""

    def on_reply(self, worker: WorkerHandle, job: Job, reply: Reply) -> None:
        """Take the reply to the first job that it held."""
        ...

    def on_deadline(self, worker: WorkerHandle, job: Job, cpu_s: float) -> None:
        """Replace a worker whose first job has run over a limit, after this much CPU time."""
        ...

    def on_exit(self, worker: WorkerHandle) -> None:
        """Replace a worker that has died by itself; `code` says how."""
        ...


class WorkerHandle(asyncio.Protocol):
    """One worker; it does its jobs in the order of `submit`, and works on the first one.

    Args:
        number: its name in the fork server.
        callbacks: the pool.
        loaded: the rules that it has from the fork server.
    """

    def __init__(self, number: int, callbacks: WorkerCallbacks, loaded: set[int]) -> None:
        self.number, self.loaded = number, loaded
        self.jobs: deque[Job] = deque()
        """The jobs that it holds, the one that it works on first."""
        self.num_done = 0
        self.is_retired = False
        """Whether it gets no more jobs, because a newer worker has a rule preloaded that this one lacks."""
        self.code: int | None = None
        self.pid: int | None = None
        self.head_since_s = 0.0
        self._cpu_before_s = 0.0
        """CPU time of the process when it took up its first job."""
        self._cpu_s = 0.0
        """CPU time that the first job had taken at `_measured_at_s`."""
        self._measured_at_s = 0.0
        self._callbacks: WorkerCallbacks | None = callbacks
        self._loop = asyncio.get_running_loop()
        self._frames = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._own_end: socket.socket | None = None
        """A copy of our end: a transport whose write failed closes its own without reading what lies there."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0
        self._late: Job | None = None

    async def connect(self, end: socket.socket) -> None:
        """Connect over our end of the socket pair."""
        self._own_end = end.dup()
        try:
            await self._loop.create_unix_connection(lambda: self, sock=end)
        except BaseException:
            self._own_end.close()
            raise

    @property
    def is_connected(self) -> bool:
        """Whether it takes jobs."""
        return self._transport is not None and self.code is None and self._callbacks is not None

    def submit(self, job: Job) -> None:
        """Send one more job."""
        assert self._transport is not None
        if not self.jobs:
            self._begin_head()
        self.jobs.append(job)
        job.num_holders += 1
        self._transport.write(job.frame)
        self.watch()

    def watch(self) -> None:
        """Set the timer for the first job's deadline, which may have come nearer."""
        if self._callbacks is None or not self.jobs:
            return
        due_s = self._due_s()
        if self._timer is None or due_s < self._timer_at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at_s = due_s
            self._timer = self._loop.call_at(due_s, self._check_deadline)

    def set_exited(self, code: int | None) -> None:
        """Note the exit that the fork server reports."""
        self.code = code
        if self._callbacks is not None:
            # its last replies may still lie in the socket: the end of the socket comes after them
            self._exit_after(0.0 if self._transport is None else EXIT_S)

    def release(self) -> list[Job]:
        """Return the jobs that it holds, in order, and call nobody back any more."""
        self._callbacks = None
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        jobs, self.jobs = list(self.jobs), deque()
        for job in jobs:
            job.num_holders -= 1
        return jobs

    # -- called by asyncio ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's class

    def data_received(self, data: bytes) -> None:
        """Take replies, which come in the order of the jobs."""
        for body in self._frames.feed(data):
            if self._callbacks is None or not self.jobs:
                return
            reply = _DECODER.decode(body)
            job = self.jobs.popleft()
            job.num_holders -= 1
            job.took_s = self._loop.time() - self.head_since_s
            self.num_done += 1
            self._cpu_before_s = reply.cpu_s
            self._begin_head()
            self.watch()
            self._callbacks.on_reply(self, job, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Read the replies that still lie in the socket, then wait for the exit code."""
        self._transport = None
        self._read_rest()
        if self._callbacks is not None:
            self._exit_after(EXIT_S if self.code is None else 0.0)

    # -- deadlines --------------------------------------------------------------------------------------------------

    def _begin_head(self) -> None:
        self.head_since_s = self._measured_at_s = self._loop.time()
        self._cpu_s = 0.0

    def _due_s(self) -> float:
        """Return the earliest time at which the first job may have run over one of its limits."""
        job = self.jobs[0]
        if job.is_load:
            return self.head_since_s + job.timeout_s
        # nobody waits for it: it must not hold the worker
        if job.is_over:
            return self.head_since_s + min(job.timeout_s, ABANDONED_S)
        # a process takes at most one second of CPU time per second
        cpu_due_s = self._measured_at_s + max(job.timeout_s - self._cpu_s, CPU_POLL_S)
        return min(cpu_due_s, self.head_since_s + job.timeout_s + WALL_SLACK_S)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._callbacks is None or not self.jobs:
            return
        job = self.jobs[0]
        if self._loop.time() >= self._due_s():
            self._measure_cpu_time()
        if self._loop.time() < self._due_s() and self._cpu_s < job.timeout_s:
            self._late = None
            self.watch()
        elif self._late is not job:
            # one more round of the event loop: the reply may have come while it was busy
            self._late = job
            self._timer_at_s = self._loop.time() + LATE_REPLY_S
            self._timer = self._loop.call_later(LATE_REPLY_S, self._check_deadline)
        else:
            self._callbacks.on_deadline(self, job, self._cpu_s)

    def _measure_cpu_time(self) -> None:
        """Measure the CPU time that the first job has taken."""
        self._measured_at_s = self._loop.time()
        if not _HAS_PROC:
            # without /proc the deadline is wall-clock time
            self._cpu_s = self._measured_at_s - self.head_since_s
        elif self.pid is not None:
            with suppress(OSError, IndexError, ValueError):  # it has ended, which the fork server reports
                fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                self._cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S - self._cpu_before_s

    # -- the end ----------------------------------------------------------------------------------------------------

    def _read_rest(self) -> None:
        """Take the replies that a worker had written before it died."""
        # without them its first job would be to blame, which it may have done already
        assert self._own_end is not None
        with self._own_end as end, suppress(OSError):  # nothing more there
            while self._callbacks is not None and (data := end.recv(65_536)):
                self.data_received(data)

    def _exit_after(self, delay_s: float) -> None:
        self._loop.call_later(delay_s, self._report_exit)

    def _report_exit(self) -> None:
        if self._callbacks is not None:
            self._callbacks.on_exit(self)
