"""The contents of a searcher's heartbeat: its state, its oldest wait and its counters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from tba.clients import BufferClient
from tba.concurrency import in_thread
from tba.errors import ServiceError, UnavailableError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import Heartbeat
from tba_searcher.waits import WaitRegistry

COUNTERS = (
    "rollouts_generated",
    "generated_tokens",
    "prefilled_tokens",
    "episodes",
    "episodes_truncated",
    "episodes_failed_engine",
    "episodes_failed_environment",
    "episodes_failed_tool",
    "episodes_failed_sandbox",
    "episodes_failed_judge",
    "agent_calls_dropped",
    "tool_calls",
    "tool_calls_failed",
    "rollouts_pushed",
    "rollouts_duplicate",
    "rollouts_refused",
    "scores_pending",
    "scores_failed",
    "ref_logprobs_unknown",
    "evals_reported",
    "evals_refused",
    "weight_loads",
    "weight_downloads_full",
    "weight_downloads_delta",
    "weight_downloads_adapter",
    "weight_downloads_cache",
    "weight_download_bytes",
    "weight_routes_failed",
    "weight_not_cached",
    "refused_versions",
    "refused_prompts",
    "leases_returned",
)
MAX_TASK_BYTES = 2048
"""Most bytes of a heartbeat for the counters of single tasks (NAME/TASK), task by task: a larger one is refused."""
HEARTBEAT_S = 1.0
HEARTBEAT_TIMEOUT_S = 5.0
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
        """Number of finished rollouts that the buffer has not acknowledged."""
        self.num_active = 0
        """Number of rollouts being decoded."""
        self.num_waiting = 0
        """Number of rollouts in the engine's queue."""
        self.num_queued = 0
        """Number of rollouts of leased visits that have not been submitted to the engine."""
        self.weight_load_s: float | None = None
        """Seconds that decoding paused for the last change of weights."""
        self.counts: Counter[str] = Counter()
        self._last = (time.monotonic(), 0)
        self._is_refused = False

    def reset(self, state: str) -> None:
        """Enter `state` after a loop has ended; clear version, gauges and waits, but keep the counters."""
        self.state, self.version, self.weight_load_s = state, None, None
        self.num_unpushed = self.num_active = self.num_waiting = self.num_queued = 0
        self.waits.clear()

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the current values; `tokens_per_s` is the rate since the previous heartbeat."""
        now, tokens = time.monotonic(), self.counts["generated_tokens"]
        since, tokens_then = self._last
        self._last = (now, tokens)
        gauges = {name: float(self.counts[name]) for name in COUNTERS}
        room = MAX_TASK_BYTES
        for name in sorted((name for name in self.counts if "/" in name), key=lambda name: name.partition("/")[::-1]):
            if (room := room - len(name) - 12) >= 0:
                gauges[name] = float(self.counts[name])
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

    async def send_forever(self, client: BufferClient) -> None:
        """Send a heartbeat every `HEARTBEAT_S`."""
        while True:
            await self.send(client)
            await asyncio.sleep(HEARTBEAT_S)

    async def send(self, client: BufferClient) -> None:
        """Send a heartbeat; a failure raises nothing. Only the first of several refusals in a row is logged."""
        heartbeat = self.heartbeat()
        try:
            # not wait_for, which can swallow a cancellation (gh-86296)
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                await in_thread(lambda: client.heartbeat(heartbeat))
        except (UnavailableError, TimeoutError) as error:
            log.debug("heartbeat lost", detail=str(error))
        except ServiceError as error:
            # refused by the buffer: this id belongs to a trainer, for example
            if not self._is_refused:
                log.warning("heartbeat_refused", detail=str(error))
            self._is_refused = True
        else:
            self._is_refused = False
