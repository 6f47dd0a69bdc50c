"""Named waits with deadlines, and calls to other services that are waited out under such a name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tba.errors import BusyError, UnavailableError, WaitTimeoutError
from tba.logs import get_logger
from tba.threads import in_thread
from tba.wire import Wait

T = TypeVar("T")
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
SLOW_CALL_S = 2.0
"""A call that takes longer is a wait with a name; the client's own timeout ends it."""
log = get_logger("waits")


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    since: float
    deadline: float


class Waits:
    """What each task of this process waits for now. At most one wait per owner; the same name again goes on."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def begin(self, owner: str, name: str, deadline_s: float) -> float:
        """`owner` waits for `name`; returns the seconds left until the deadline (below 0 when it has passed)."""
        now, entry = time.monotonic(), self._entries.get(owner)
        if entry is None or entry.name != name:
            entry = self._entries[owner] = _Entry(name, now, now + deadline_s)
        return entry.deadline - now

    def end(self, owner: str) -> None:
        """`owner` no longer waits."""
        self._entries.pop(owner, None)

    def clear(self) -> None:
        """Nobody waits any more: the tasks are gone."""
        self._entries.clear()

    def current(self) -> Wait | None:
        """The wait that began first."""
        if not self._entries:
            return None
        now, entry = time.monotonic(), min(self._entries.values(), key=lambda entry: entry.since)
        return Wait(name=entry.name, for_s=now - entry.since, deadline_in_s=entry.deadline - now)


async def patiently(
    call: Callable[[], T],
    *,
    waits: Waits,
    owner: str,
    service: str,
    deadline_s: float,
    renew_busy: bool = True,
    ends: Callable[[], bool] = lambda: False,
) -> T:
    """Call a service; wait while it is busy or away.

    A busy answer (429) comes from a service that is well and names what it waits for: the wait has that name. With
    `renew_busy` it is renewed (and logged) at its deadline, so that no paid-for rollout is thrown away. A service
    that does not answer is waited for under `<service>-unreachable`, from when a single call takes long.

    Args:
        ends: asked before each pause and after it; once true, a call that failed is not made again.

    Raises:
        WaitTimeoutError: a wait reached its deadline of `deadline_s`.
        BusyError, UnavailableError: the service is busy or away, and `ends` said true.
        ServiceError: the service refused.
    """
    pause_s = _MIN_PAUSE_S
    try:
        while True:
            try:
                return await _shown(call, waits, owner, f"{service}-unreachable", deadline_s)
            except BusyError as busy:
                if ends():
                    raise
                if waits.begin(owner, busy.wait, deadline_s) <= 0:
                    if not renew_busy:
                        raise WaitTimeoutError(f"wait {busy.wait}: {deadline_s:g} s are over: {busy}") from None
                    log.warning("wait renewed", wait=busy.wait, deadline_s=deadline_s)
                    waits.end(owner)
                await asyncio.sleep(min(max(busy.retry_after_s, _MIN_PAUSE_S), _MAX_PAUSE_S))
                if ends():
                    raise
            except UnavailableError as error:
                if ends():
                    raise
                name = f"{service}-unreachable"
                if waits.begin(owner, name, deadline_s) <= 0:
                    raise WaitTimeoutError(f"wait {name}: no answer for {deadline_s:g} s: {error}") from None
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                await asyncio.sleep(pause_s)
                if ends():
                    raise
    finally:
        waits.end(owner)


async def _shown(call: Callable[[], T], waits: Waits, owner: str, name: str, deadline_s: float) -> T:
    """Call in a thread; a wait is shown while that takes long."""
    task = asyncio.ensure_future(in_thread(call))
    try:
        if not (await asyncio.wait({task}, timeout=SLOW_CALL_S))[0]:
            waits.begin(owner, name, deadline_s)
        return await task
    finally:
        task.cancel()
