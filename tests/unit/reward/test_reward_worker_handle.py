"""The replies that a worker's handle takes: only that to its job, also when the worker has died over the next one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop
from tba_reward.child_messages import Reply, frame
from tba_reward.process_pool.job import Job, PoolRule, WorkerRule
from tba_reward.process_pool.worker_handle import WorkerHandle
from tba_reward.scorer import Item, Outcome

ENDED_PID = 2**22 + 1
"""No process has it: it is above the largest that Linux gives."""


def reply(number: int, outcomes: list[Outcome]) -> bytes:
    return frame(Reply(number, outcomes, cpu_s=0.0, pid=ENDED_PID))


async def a_worker_that_dies_over_its_second_job() -> None:
    ours, theirs = socket.socketpair()
    done: list[tuple[Job, list[Outcome]]] = []
    has_replied, has_ended = asyncio.Event(), asyncio.Event()

    def on_reply(worker: WorkerHandle, job: Job, outcomes: list[Outcome]) -> None:
        done.append((job, outcomes))
        has_replied.set()

    worker = WorkerHandle(None, on_reply=on_reply, on_lost=lambda worker: has_ended.set())
    await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
    rule, item = PoolRule(0, WorkerRule(function="m:f")), Item(prompt="", response="")
    first, second = (Job(rule, 60.0, [item] * num_items) for num_items in (1, 2))
    worker.submit(first)
    # a reply to another job than its own is dropped, whoever has written it
    theirs.sendall(reply(second.number, [7.0]) + reply(first.number, [1.0]))
    await asyncio.wait_for(has_replied.wait(), 60)
    worker.submit(second)
    theirs.sendall(reply(second.number, [2.0]) + reply(second.number, [3.0])[:-1])
    theirs.close()
    await asyncio.wait_for(has_ended.wait(), 60)
    assert done == [(first, [1.0]), (second, [2.0])]
    assert (worker.job, second.num_done) == (second, 1), "its second item is the one in work"
    worker.since_s -= 60
    assert worker.cpu_s() == 0.0, "nobody knows it of a process that has ended"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_only_the_reply_to_its_job_is_taken(run: Callable[..., None]) -> None:
    run(a_worker_that_dies_over_its_second_job())
