"""No wait of a searcher swallows a cancellation, and a call that takes long is shown as a wait."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tba_searcher.generation.status import WaitRegistry, retry_until
from tba_searcher.loop import SearcherLoop

from tests.support.waiting import until


async def test_a_task_that_is_cancelled_in_the_moment_its_pause_ends_is_cancelled() -> None:
    """asyncio.wait_for of Python 3.11 forgets such a cancellation (github.com/python/cpython/issues/86296)."""
    num_cancelled = 0
    for num_ticks in range(4):  # between the end of the inner wait and that of the task
        loop = SearcherLoop.__new__(SearcherLoop)
        loop._has_work = asyncio.Event()
        task = asyncio.create_task(loop._sleep_until_work(60.0))
        for _ in range(3):
            await asyncio.sleep(0)
        loop._has_work.set()
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            num_cancelled += 1
    assert num_cancelled


async def test_a_call_that_takes_long_is_a_wait_with_a_name(monkeypatch) -> None:
    monkeypatch.setattr("tba_searcher.generation.status.SLOW_CALL_S", 0.01)
    waits, answer = WaitRegistry(), threading.Event()
    call = asyncio.create_task(
        retry_until(lambda: answer.wait(60), waits=waits, owner="leasing", service="buffer", deadline_s=30.0)
    )
    wait = await asyncio.to_thread(until, "the wait", waits.current)
    assert wait is not None
    assert wait.name == "buffer-unreachable"
    assert 0 < wait.deadline_in_s <= 30.0
    answer.set()
    assert await call is True
    assert waits.current() is None
