"""Calls in threads; one action at a time, shared by all waiting callers: none gets one that began before its call."""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial

import pytest

from tba import concurrency
from tba.concurrency import SingleFlight, in_thread
from tba.errors import SupersededError, UnavailableError


class Action:
    """Copies `now` to `seen` at its beginning, ends when `gate` opens."""

    def __init__(self) -> None:
        self.now = self.seen = self.num_runs = 0
        self.gate = asyncio.Event()
        self.error: UnavailableError | None = None

    async def __call__(self) -> None:
        self.num_runs += 1
        seen = self.now
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.seen = seen


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_two_runs_serve_all_who_wait_and_nobody_gets_an_old_one() -> None:
    action = Action()
    shared = SingleFlight(action, asyncio.Lock())
    first = asyncio.create_task(shared.run())
    await settle()
    action.now = 1
    late = [asyncio.create_task(shared.run()) for _ in range(10)]
    await settle()
    assert (action.num_runs, first.done()) == (1, False)
    action.gate.set()
    await asyncio.gather(first, *late)
    assert (action.num_runs, action.seen) == (2, 1)
    await shared.run()
    assert action.num_runs == 3


async def test_a_failure_is_that_of_everyone_it_was_for_and_of_nobody_else() -> None:
    action = Action()
    shared = SingleFlight(action, asyncio.Lock())
    first = asyncio.create_task(shared.run())
    await settle()
    late = [asyncio.create_task(shared.run()) for _ in range(3)]
    await settle()
    action.error = SupersededError("a newer process")
    action.gate.set()
    results = await asyncio.gather(first, *late, return_exceptions=True)
    assert [type(result) for result in results] == [SupersededError] * 4
    assert action.num_runs == 2
    action.error = None
    await shared.run()
    assert action.num_runs == 3


async def test_one_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    action = Action()
    shared = SingleFlight(action, asyncio.Lock())
    waiting = [asyncio.create_task(shared.run()) for _ in range(3)]
    await settle()
    waiting[0].cancel()
    await settle()
    assert (action.num_runs, waiting[1].done()) == (2, False)
    action.gate.set()
    await asyncio.gather(*waiting[1:])
    assert action.num_runs == 2
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def test_calls_one_after_another_share_a_thread_and_slow_ones_have_their_own() -> None:
    first = {await in_thread(threading.get_ident) for _ in range(20)}
    # a thread is idle again a moment after its result is here; on a busy machine the next call may be sooner
    assert len(first) <= 10
    together = threading.Barrier(8)

    def meet() -> int:
        together.wait(10)  # breaks unless all eight run at the same time
        return threading.get_ident()

    assert len(set(await asyncio.gather(*(in_thread(meet) for _ in range(8))))) == 8


async def test_an_idle_thread_ends_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "_IDLE_S", 0.05)

    class Large:
        pass

    def use(large: Large) -> threading.Thread:
        return threading.current_thread()

    held = Large()
    seen = weakref.ref(held)
    thread = await in_thread(partial(use, held))
    del held
    for _ in range(200):
        if seen() is None and not thread.is_alive():
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"held: {seen()}, alive: {thread.is_alive()}")
