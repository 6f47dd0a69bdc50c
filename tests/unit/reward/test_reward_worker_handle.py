"""The replies of a worker that has died are taken, also when the next job can no longer be written to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop
from tba_reward.process_pool.job import Job
from tba_reward.process_pool.pool_messages import Reply, encode
from tba_reward.process_pool.worker_handle import WorkerHandle
from tba_reward.scorer import Item


class Recorder:
    """The callbacks of one worker."""

    def __init__(self) -> None:
        self.done: list[Job] = []
        self.has_ended = asyncio.Event()

    def on_reply(self, worker: WorkerHandle, job: Job, reply: Reply) -> None:
        self.done.append(job)

    def on_deadline(self, worker: WorkerHandle, job: Job, cpu_s: float) -> None:
        raise AssertionError("no deadline passes here")

    def on_exit(self, worker: WorkerHandle) -> None:
        self.has_ended.set()


async def a_write_to_a_dead_worker() -> None:
    ours, theirs = socket.socketpair()
    recorder = Recorder()
    worker = WorkerHandle(1, recorder, set())
    await worker.connect(ours)
    item, loop = Item(prompt="", response=""), asyncio.get_running_loop()
    load, poison, behind = (
        Job(0, encode(Reply(number, [])), 60.0, [loop.create_future()], [item] * (number > 0)) for number in range(3)
    )
    worker.submit(load)
    worker.submit(poison)
    theirs.sendall(encode(Reply(0, [])))
    theirs.close()  # it dies over the second, before the first reply is read here
    worker.submit(behind)
    worker.set_exited(-11)
    await asyncio.wait_for(recorder.has_ended.wait(), 60)
    assert recorder.done == [load]
    assert list(worker.jobs) == [poison, behind]
    worker.release()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reply_that_lies_in_the_socket_is_taken_after_a_failed_write(run: Callable[..., None]) -> None:
    run(a_write_to_a_dead_worker())
