"""What a worker said before it died is heard, also when the next job can no longer be written to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop
from tba_reward.scorers.base import Item
from tba_reward.workers.job import Job
from tba_reward.workers.messages import Reply, encode
from tba_reward.workers.worker import Worker


class Heard:
    """Owner of one worker."""

    def __init__(self) -> None:
        self.done: list[Job] = []
        self.has_ended = asyncio.Event()

    def replied(self, worker: Worker, job: Job, reply: Reply) -> None:
        self.done.append(job)

    def overdue(self, worker: Worker, job: Job, cpu_s: float) -> None:
        raise AssertionError("no deadline passes here")

    def ended(self, worker: Worker) -> None:
        self.has_ended.set()


async def a_write_to_a_dead_worker() -> None:
    ours, theirs = socket.socketpair()
    owner = Heard()
    worker = Worker(1, owner, set())
    await worker.connect(ours)
    item, loop = Item(prompt="", response=""), asyncio.get_running_loop()
    prepare, poison, behind = (
        Job(0, encode(Reply(number, [])), 60.0, [loop.create_future()], [item] * (number > 0)) for number in range(3)
    )
    worker.give(prepare)
    worker.give(poison)
    theirs.sendall(encode(Reply(0, [])))
    theirs.close()  # it dies over the second, before anybody here has read the first reply
    worker.give(behind)
    worker.exited(-11)
    await asyncio.wait_for(owner.has_ended.wait(), 60)
    assert owner.done == [prepare]
    assert list(worker.held) == [poison, behind]
    worker.drop()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reply_that_lies_in_the_socket_is_heard_after_a_failed_write(run: Callable[..., None]) -> None:
    run(a_write_to_a_dead_worker())
