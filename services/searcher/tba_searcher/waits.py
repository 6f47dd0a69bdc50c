"""Named waits, and calls of other services that are retried under them.

Every wait has a name and a deadline. A heartbeat shows the oldest wait. A wait that reaches its deadline is logged and
renewed, or ends in an error with its name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tba.concurrency import in_thread
from tba.errors import BusyError, UnavailableError, WaitTimeoutError
from tba.logs import get_logger
from tba.wire import Wait

T = TypeVar("T")
RETRY_S = 120.0
"""How long a call to another service is retried before the searcher gives up."""
SCORE_RETRY_S = 10.0
"""How long scoring is retried before rollouts are pushed unscored (pending)."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
SLOW_CALL_S = 2.0
"""A call that takes longer is shown as a wait; the client's own timeout ends the call."""
log = get_logger("status")


@dataclass(frozen=True, slots=True)
class _RegisteredWait:
    name: str
    since: float
    deadline: float


class WaitRegistry:
    """The named waits of one searcher, at most one per owner (a task)."""

    def __init__(self) -> None:
        self._waits: dict[str, _RegisteredWait] = {}

    def begin(self, owner: str, name: str, deadline_s: float) -> float:
        """Register that `owner` waits for `name`; the same name again continues the wait.

        Returns:
            Seconds left until the deadline, below 0 when it has passed.
        """
        now, wait = time.monotonic(), self._waits.get(owner)
        # another name is another wait with a deadline of its own
        if wait is None or wait.name != name:
            wait = self._waits[owner] = _RegisteredWait(name, now, now + deadline_s)
        return wait.deadline - now

    def renew(self, owner: str, name: str, *, detail: str = "") -> None:
        """Begin or continue a wait of `RETRY_S`. At its deadline log a warning and begin it again; raise nothing."""
        if self.begin(owner, name, RETRY_S) <= 0:
            log.warning("wait renewed", wait=name, deadline_s=RETRY_S, detail=detail)
            self.end(owner)
            self.begin(owner, name, RETRY_S)

    def end(self, owner: str) -> None:
        """Remove the wait of `owner`, if there is one."""
        self._waits.pop(owner, None)

    def clear(self) -> None:
        """Remove all waits, after their tasks have ended."""
        self._waits.clear()

    def current(self) -> Wait | None:
        """Return the wait that began first."""
        waits = list(self._waits.values())  # a thread that downloads may begin or end one meanwhile
        if not waits:
            return None
        # one wait fits into a heartbeat: the oldest one is the likeliest reason why nothing moves
        now, wait = time.monotonic(), min(waits, key=lambda wait: wait.since)
        return Wait(name=wait.name, for_s=now - wait.since, deadline_in_s=wait.deadline - now)


async def retry_until(
    call: Callable[[], T],
    *,
    waits: WaitRegistry,
    owner: str,
    service: str,
    deadline_s: float,
    renew_busy: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> T:
    """Call a service in a thread, and retry with pauses while the service is busy or away.

    A busy answer (429) names what the service waits for, and that is the name of the wait. While a service does not
    answer, the wait is named `<service>-unreachable`.

    Args:
        renew_busy: whether to log and renew the wait for a busy service at its deadline instead of raising.
        should_stop: called before and after each pause; once it returns true, a failed call is not retried.

    Raises:
        WaitTimeoutError: a wait reached its deadline of `deadline_s`.
        BusyError, UnavailableError: the service is busy or away, and `should_stop` returned true.
        ServiceError: the service refused.
    """
    pause_s = _MIN_PAUSE_S
    try:
        while True:
            try:
                return await _call_in_thread(call, waits, owner, f"{service}-unreachable", deadline_s)
            except (BusyError, UnavailableError) as error:
                if should_stop():
                    raise
                is_busy = isinstance(error, BusyError)
                name = error.wait if is_busy else f"{service}-unreachable"
                if waits.begin(owner, name, deadline_s) <= 0:
                    if not (is_busy and renew_busy):
                        raise WaitTimeoutError(f"wait {name}: no answer for {deadline_s:g} s: {error}") from None
                    # the service is well, and giving up would throw paid-for rollouts away
                    log.warning("wait renewed", wait=name, deadline_s=deadline_s)
                    waits.end(owner)
                # hundreds of searchers may wait for the same service, and must not call it twenty times a second each
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                await asyncio.sleep(min(max(error.retry_after_s, _MIN_PAUSE_S), _MAX_PAUSE_S) if is_busy else pause_s)
                if should_stop():
                    raise
    finally:
        waits.end(owner)


async def _call_in_thread(call: Callable[[], T], waits: WaitRegistry, owner: str, name: str, deadline_s: float) -> T:
    """Run `call` in a thread and return its result; register a wait if it takes longer than SLOW_CALL_S."""
    task = asyncio.ensure_future(in_thread(call))
    try:
        if not (await asyncio.wait({task}, timeout=SLOW_CALL_S))[0]:
            waits.begin(owner, name, deadline_s)
        return await task
    finally:
        # the thread of a call that was given up runs to its end; its result is dropped
        task.cancel()


async def sleep_until(event: asyncio.Event, seconds: float) -> None:
    """Clear the event, and sleep until something sets it, at most for `seconds`."""
    event.clear()
    try:
        async with asyncio.timeout(seconds):  # not wait_for, which can swallow a cancellation (gh-86296)
            await event.wait()
    except TimeoutError:
        return
