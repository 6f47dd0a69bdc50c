"""One action at a time, shared by all who ask for it while they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tba.errors import UnavailableError


class Coalesced:
    """An action that takes in everything that happened before it begins, so one run of it serves many callers.

    `run` returns once the action has run, begun after the call. However many wait, at most two runs serve them: the one
    under way is too old for them, the next one is enough for all.

    Args:
        action: what is run; a failure (UnavailableError) is the failure of everyone it was run for.
        lock: held while it runs.
    """

    def __init__(self, action: Callable[[], Awaitable[None]], lock: asyncio.Lock) -> None:
        self._action = action
        self._lock = lock
        self._num_begun = 0
        self._last_ended = 0
        self._error: UnavailableError | None = None

    async def run(self) -> None:
        """The action, begun after now.

        Raises:
            UnavailableError: the action failed.
        """
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
            self._last_ended = number  # not when cancelled: the next who waits runs it then
