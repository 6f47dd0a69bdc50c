"""The state that a searcher shows in its heartbeat: what it does, what it waits for, what it has counted.

Calls to other services go through `retry_until`: it retries while the service is busy or away, and shows the wait under
a name with a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tba.concurrency import in_thread
from tba.errors import BusyError, ServiceError, UnavailableError, WaitTimeoutError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import Heartbeat, Wait

T = TypeVar("T")
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
SLOW_CALL_S = 2.0
"""A call that takes longer is shown as a wait; the client's own timeout ends the call."""
COUNTERS = (
    "rollouts_generated",
    "generated_tokens",
    "rollouts_pushed",
    "rollouts_duplicate",
    "rollouts_refused",
    "scores_pending",
    "scores_failed",
    "ref_logprobs_unknown",
    "evals_reported",
    "weight_loads",
    "refused_versions",
    "refused_prompts",
    "leases_returned",
)
log = get_logger("status")


class SearcherStatus:
    """The current state, and counters since the start of the process.

    `state` is one of starting, running, evaluating, draining, ended, failed (the engine died), idle (the run is over,
    and `searcher.on_run_end` is "wait").
    """

    def __init__(self, *, searcher_id: str, run: str, waits: WaitRegistry) -> None:
        self.searcher_id, self.run, self.waits = searcher_id, run, waits
        self.state = "starting"
        self.version: PolicyVersion | None = None
        self.num_unpushed = 0
        """Finished rollouts that the buffer has not acknowledged."""
        self.num_active = 0
        """Rollouts being decoded."""
        self.num_waiting = 0
        """Rollouts in the engine's queue."""
        self.num_queued = 0
        """Rollouts of leased visits that have not been submitted to the engine."""
        self.weight_load_s: float | None = None
        """How long the last change of weights held up decoding."""
        self.counts: Counter[str] = Counter()
        self._last = (time.monotonic(), 0)
        self._heartbeat_refusal: str | None = None

    def reset(self, state: str) -> None:
        """Enter `state` after a loop has ended and the process continues: nothing is held or waited for."""
        self.state, self.version, self.weight_load_s = state, None, None
        self.num_unpushed = self.num_active = self.num_waiting = self.num_queued = 0
        self.waits.clear()

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat as of now; `tokens_per_s` is the rate since the previous one."""
        now, tokens = time.monotonic(), self.counts["generated_tokens"]
        since, tokens_then = self._last
        self._last = (now, tokens)
        gauges = {name: float(self.counts[name]) for name in COUNTERS}
        # two heartbeats may come at nearly the same time: at the end of a run, for example
        gauges["tokens_per_s"] = (tokens - tokens_then) / max(now - since, 1e-3)
        gauges["unpushed"] = float(self.num_unpushed)
        gauges["active_slots"] = float(self.num_active)
        gauges["waiting_requests"] = float(self.num_waiting)
        gauges["queued_rollouts"] = float(self.num_queued)
        if self.weight_load_s is not None:
            gauges["weight_load_s"] = self.weight_load_s
        return Heartbeat(
            component_id=self.searcher_id,
            kind="searcher",
            run=self.run,
            state=self.state,
            version=self.version,
            wait=self.waits.current(),
            gauges=gauges,
        )

    def record_heartbeat(self, error: Exception | None) -> None:
        """Record how a heartbeat ended. Log a refusal once, until a heartbeat is accepted."""
        # refused by the buffer (this id belongs to a trainer, for example), not lost on its way
        is_refused = isinstance(error, ServiceError) and not isinstance(error, UnavailableError)
        refusal = str(error) if is_refused else None
        if refusal is not None and self._heartbeat_refusal is None:
            log.warning("heartbeat_refused", detail=refusal)
        elif error is not None:
            log.debug("heartbeat lost", detail=str(error))
        self._heartbeat_refusal = refusal or (self._heartbeat_refusal if error is not None else None)


@dataclass(frozen=True, slots=True)
class _RegisteredWait:
    name: str
    since: float
    deadline: float


class WaitRegistry:
    """The named waits of this process, at most one per owner (a task)."""

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

    def end(self, owner: str) -> None:
        """Remove the wait of `owner`, if there is one."""
        self._waits.pop(owner, None)

    def clear(self) -> None:
        """Remove all waits: their tasks are gone."""
        self._waits.clear()

    def current(self) -> Wait | None:
        """Return the wait that began first."""
        if not self._waits:
            return None
        # one wait fits into a heartbeat: the oldest one is the likeliest reason why nothing moves
        now, wait = time.monotonic(), min(self._waits.values(), key=lambda wait: wait.since)
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
    """Call a service; retry while it is busy or away.

    A busy answer (429) names what the service waits for, and the wait has that name. A service that does not answer is
    waited for under `<service>-unreachable`.

    Args:
        renew_busy: renew (and log) the wait for a busy service at its deadline instead of raising.
        should_stop: asked before and after each pause; once true, a call that failed is not made again.

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
            except BusyError as busy:
                if should_stop():
                    raise
                if waits.begin(owner, busy.wait, deadline_s) <= 0:
                    if not renew_busy:
                        raise WaitTimeoutError(f"wait {busy.wait}: {deadline_s:g} s are over: {busy}") from None
                    # the service is well, and giving up would throw paid-for rollouts away
                    log.warning("wait renewed", wait=busy.wait, deadline_s=deadline_s)
                    waits.end(owner)
                await asyncio.sleep(min(max(busy.retry_after_s, _MIN_PAUSE_S), _MAX_PAUSE_S))
                if should_stop():
                    raise
            except UnavailableError as error:
                if should_stop():
                    raise
                name = f"{service}-unreachable"
                if waits.begin(owner, name, deadline_s) <= 0:
                    raise WaitTimeoutError(f"wait {name}: no answer for {deadline_s:g} s: {error}") from None
                # hundreds of searchers may wait for the same service, and must not call it twenty times a second each
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                await asyncio.sleep(pause_s)
                if should_stop():
                    raise
    finally:
        waits.end(owner)


async def _call_in_thread(call: Callable[[], T], waits: WaitRegistry, owner: str, name: str, deadline_s: float) -> T:
    """Call in a thread, and register a wait when the call takes longer than SLOW_CALL_S."""
    task = asyncio.ensure_future(in_thread(call))
    try:
        if not (await asyncio.wait({task}, timeout=SLOW_CALL_S))[0]:
            waits.begin(owner, name, deadline_s)
        return await task
    finally:
        # the thread of a call that was given up runs to its end; its result is dropped
        task.cancel()
