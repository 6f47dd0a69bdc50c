"""One worker process as the pool sees it: what it holds, and how long it may take over the first of it."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress
from typing import Protocol, cast

import msgspec

from tba_reward.workers.job import Job
from tba_reward.workers.messages import Frames, Reply

LATE_S = 0.05
"""After a deadline: the reply may lie in the socket already, if the event loop was busy."""
GIVEN_UP_S = 0.5
"""What nobody waits for any more may take this long before its worker is killed."""
EXIT_S = 1.0
"""From the report of its exit to the end of its socket, which brings the last replies."""
_DECODER = msgspec.msgpack.Decoder(Reply)


class Owner(Protocol):
    """What a worker tells the pool."""

    def replied(self, worker: Worker, job: Job, reply: Reply) -> None:
        """The first job it held is done."""
        ...

    def overdue(self, worker: Worker, job: Job) -> None:
        """The first job it holds has run over its deadline; the worker is of no use any more."""
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
        self.head_since_s = 0.0
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
            self.head_since_s = self._loop.time()
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
            self.head_since_s = self._loop.time()
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

    def _due_s(self) -> float:
        job = self.held[0]
        is_given_up = job.is_over and not job.is_prepare
        return self.head_since_s + (min(job.timeout_s, GIVEN_UP_S) if is_given_up else job.timeout_s)

    def _look(self) -> None:
        self._timer = None
        if self._owner is None or not self.held:
            return
        job = self.held[0]
        if self._loop.time() < self._due_s():
            self._late = None
            self.watch()
        elif self._late is not job:
            self._late = job
            self._look_at_s = self._loop.time() + LATE_S
            self._timer = self._loop.call_later(LATE_S, self._look)
        else:
            self._owner.overdue(self, job)

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
