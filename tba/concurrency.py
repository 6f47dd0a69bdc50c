"""Two helpers for asyncio: a blocking call in a thread, and one action shared by many callers (single flight)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tba.errors import UnavailableError

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a daemon thread.

    Raises:
        BaseException: the error that the call raised.
    """
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

    # a daemon thread and not asyncio.to_thread: a slow service must never hold up the end of the process
    threading.Thread(target=work, daemon=True).start()
    return await future


class SingleFlight:
    """Share the runs of an action among its callers.

    The action covers everything that happened before it begins, so one run serves every caller that came before it.

    Args:
        action: is run; its failure (UnavailableError) is raised to every caller that it was run for.
        lock: held while the action runs.
    """

    def __init__(self, action: Callable[[], Awaitable[None]], lock: asyncio.Lock) -> None:
        self._action = action
        self._lock = lock
        self._num_begun = 0
        self._last_ended = 0
        self._error: UnavailableError | None = None

    async def run(self) -> None:
        """Wait for a run of the action that begins after this call.

        Raises:
            UnavailableError: the action failed.
        """
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
