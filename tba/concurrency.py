"""Helpers for concurrency: blocking calls in threads, and one asyncio action shared by many callers (single flight)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import ClassVar, TypeVar

from tba.errors import UnavailableError

T = TypeVar("T")
_IDLE_S = 10.0
"""Seconds without a call after which a thread ends."""


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a daemon thread, and await its result or error."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        # the caller was cancelled meanwhile
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    _CallThread.run_call(work)
    return await future


def begin_in_thread(call: Callable[[], T]) -> Future[T]:
    """Start a blocking call in a daemon thread, and return its future at once; for code without an event loop."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as caught:
            future.set_exception(caught)

    _CallThread.run_call(work)
    return future


class _CallThread(threading.Thread):
    """A daemon thread that runs one call after the other.

    asyncio.to_thread uses no daemon threads, so a slow service could delay the end of the process. Idle threads are
    kept for later calls, because starting a thread takes long while other threads compute.
    """

    _idle: ClassVar[deque[_CallThread]] = deque()

    def __init__(self) -> None:
        super().__init__(name="call", daemon=True)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    @classmethod
    def run_call(cls, call: Callable[[], None]) -> None:
        """Run a call in an idle thread or in a new one. The call must raise nothing."""
        try:
            thread = cls._idle.pop()
        except IndexError:
            thread = cls()
            thread.start()
        thread._calls.put(call)

    def run(self) -> None:
        """Run calls until none has come for _IDLE_S seconds."""
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                try:
                    self._idle.remove(self)
                except ValueError:  # it has been taken for a call that comes now
                    continue
                return
            call()
            del call  # what it holds must not live on in an idle thread
            self._idle.append(self)


# a forked child has none of these threads
os.register_at_fork(after_in_child=_CallThread._idle.clear)


class SingleFlight:
    """Run an asyncio action for many callers at once (single flight).

    One run of the action serves all callers that have called `run` before this run begins.

    Args:
        action: if it raises UnavailableError, every caller that waits for this run gets that error.
        lock: held while the action runs.
    """

    def __init__(self, action: Callable[[], Awaitable[None]], lock: asyncio.Lock) -> None:
        self._action = action
        self._lock = lock
        self._num_begun = 0
        self._last_ended = 0
        self._error: UnavailableError | None = None

    async def run(self) -> None:
        """Wait for a whole run of the action that begins after this call. Start that run if no other caller does."""
        # the run under way began too early for this caller; the next one is enough for all that wait now
        wanted = self._num_begun + 1
        async with self._lock:
            if self._last_ended >= wanted:
                if self._error is not None:
                    raise type(self._error)(str(self._error))
                return
            self._num_begun += 1
            number, self._error = self._num_begun, None
            try:
                await self._action()
            except UnavailableError as error:
                self._last_ended, self._error = number, error
                raise
            self._last_ended = number  # not when cancelled: the next caller then runs the action
