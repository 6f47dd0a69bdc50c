"""One worker process as the pool sees it: what it holds, and how long it may take over the first of it.

An item's deadline is CPU time of the process, so that a busy machine does not fail what would have been scored. The
second limit is wall-clock time, for what waits and computes nothing.
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

from tba_reward.workers.job import Job
from tba_reward.workers.messages import Frames, Reply

LATE_S = 0.05
"""After a deadline: the reply may lie in the socket already, if the event loop was busy."""
WALL_SLACK_S = 25.0
"""By the clock on the wall an item may take this much longer than its deadline: less than what a request is given
beyond its slowest scorer's deadline (`RewardSection.request_deadline_s`)."""
LOOK_S = 0.02
"""Pause between two looks at the CPU time of a worker that is nearly due."""
GIVEN_UP_S = 0.5
"""What nobody waits for any more may take this long before its worker is killed."""
EXIT_S = 1.0
"""From the report of its exit to the end of its socket, which brings the last replies."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HAS_PROC = Path("/proc/self/stat").exists()
_DECODER = msgspec.msgpack.Decoder(Reply)


class Owner(Protocol):
    """What a worker tells the pool."""

    def replied(self, worker: Worker, job: Job, reply: Reply) -> None:
        """The first job it held is done."""
        ...

    def overdue(self, worker: Worker, job: Job, cpu_s: float) -> None:
        """The first job it holds has run over a limit, having taken this CPU time; the worker is of no use any more."""
        ...

    def ended(self, worker: Worker) -> None:
        """It has died by itself; `code` says how."""
        ...


class Worker(asyncio.Protocol):
    """Jobs are done in the order of `give`; the first one is the one it works on.

    Args:
        number: its name in the nursery.
        owner: the pool.
        prepared: the rules that it has from the nursery.
    """

    def __init__(self, number: int, owner: Owner, prepared: set[int]) -> None:
        self.number, self.prepared = number, prepared
        self.held: deque[Job] = deque()
        self.num_done = 0
        self.is_retired = False
        """Whether it gets no more jobs, because a newer one would be better prepared."""
        self.code: int | None = None
        self.pid: int | None = None
        self.head_since_s = 0.0
        self._cpu_before_s = 0.0
        """CPU time of the process when it took up the first job it holds."""
        self._cpu_s = 0.0
        """What that job had taken at the last look ..."""
        self._looked_at_s = 0.0
        """... which was then."""
        self._owner: Owner | None = owner
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._rest: socket.socket | None = None
        """Our end once more: a transport whose write failed closes its own without reading what lies there."""
        self._timer: asyncio.TimerHandle | None = None
        self._look_at_s = 0.0
        self._late: Job | None = None

    async def connect(self, end: socket.socket) -> None:
        """Talk over our end of the socket pair."""
        self._rest = end.dup()
        try:
            await self._loop.create_unix_connection(lambda: self, sock=end)
        except BaseException:
            self._rest.close()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is none by its class

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: replies, in the order of the jobs."""
        for body in self._frames.feed(data):
            if self._owner is None or not self.held:
                return
            reply = _DECODER.decode(body)
            job = self.held.popleft()
            job.num_holders -= 1
            self.num_done += 1
            self._cpu_before_s = reply.cpu_s
            self._begin_head()
            self.watch()
            self._owner.replied(self, job, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: no reply comes any more but those that lie in the socket."""
        self._transport = None
        self._read_rest()
        if self._owner is not None:
            self._end_soon(EXIT_S if self.code is None else 0.0)

    def give(self, job: Job) -> None:
        """One more job."""
        assert self._transport is not None
        if not self.held:
            self._begin_head()
        self.held.append(job)
        job.num_holders += 1
        self._transport.write(job.frame)
        self.watch()

    def watch(self) -> None:
        """Look again at the first job's deadline, which may have come nearer."""
        if self._owner is None or not self.held:
            return
        due_s = self._due_s()
        if self._timer is None or due_s < self._look_at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._look_at_s = due_s
            self._timer = self._loop.call_at(due_s, self._look)

    def exited(self, code: int | None) -> None:
        """The nursery says that it is gone."""
        self.code = code
        if self._owner is not None:
            self._end_soon(0.0 if self._transport is None else EXIT_S)

    def drop(self) -> list[Job]:
        """Let go of it: what it held, in order. It says nothing any more."""
        self._owner = None
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        jobs, self.held = list(self.held), deque()
        for job in jobs:
            job.num_holders -= 1
        return jobs

    @property
    def is_connected(self) -> bool:
        """Whether it takes jobs."""
        return self._transport is not None and self.code is None and self._owner is not None

    def _begin_head(self) -> None:
        self.head_since_s = self._looked_at_s = self._loop.time()
        self._cpu_s = 0.0

    def _due_s(self) -> float:
        """When the first job may have run over its deadline at the earliest, or runs over the wall-clock limit."""
        job = self.held[0]
        if job.is_prepare:
            return self.head_since_s + job.timeout_s
        if job.is_over:
            return self.head_since_s + min(job.timeout_s, GIVEN_UP_S)
        cpu_due_s = self._looked_at_s + max(job.timeout_s - self._cpu_s, LOOK_S)
        return min(cpu_due_s, self.head_since_s + job.timeout_s + WALL_SLACK_S)

    def _look(self) -> None:
        self._timer = None
        if self._owner is None or not self.held:
            return
        job = self.held[0]
        if self._loop.time() >= self._due_s():
            self._measure()
        if self._loop.time() < self._due_s() and self._cpu_s < job.timeout_s:
            self._late = None
            self.watch()
        elif self._late is not job:
            self._late = job
            self._look_at_s = self._loop.time() + LATE_S
            self._timer = self._loop.call_later(LATE_S, self._look)
        else:
            self._owner.overdue(self, job, self._cpu_s)

    def _measure(self) -> None:
        """See how much CPU time the first job has taken; where no system tells, as much as it was there."""
        self._looked_at_s = self._loop.time()
        if not _HAS_PROC:
            self._cpu_s = self._looked_at_s - self.head_since_s
        elif self.pid is not None:
            with suppress(OSError, IndexError, ValueError):  # it has ended, which is heard of otherwise
                fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
                self._cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S - self._cpu_before_s

    def _read_rest(self) -> None:
        """What a worker said before it died: else its first job would be to blame, which it may have done."""
        assert self._rest is not None
        with self._rest as end, suppress(OSError):  # nothing more there
            while self._owner is not None and (data := end.recv(65_536)):
                self.data_received(data)

    def _end_soon(self, delay_s: float) -> None:
        self._loop.call_later(delay_s, self._end)

    def _end(self) -> None:
        if self._owner is not None:
            self._owner.ended(self)
