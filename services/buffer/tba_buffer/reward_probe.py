"""The reward service as a component: asked for its /readyz every PROBE_S, each time for ANSWER_S at most.

A scorer that raises for every item fails the run: nothing could ever be trained on, however long it waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tba.api import ComponentInfo
from tba.clients import RewardClient
from tba.config import Recipe
from tba.errors import BrokenRewardError, ServiceError
from tba.logs import get_logger
from tba.threads import in_thread

PROBE_S = 5.0
ANSWER_S = 5.0
MAX_NOTE_CHARS = 2000
log = get_logger("reward-probe")


class RewardProbe:
    """Asks in the background; `info` answers at once.

    Args:
        recipe: where the reward service is.
        on_broken: called with the reason each time that a scorer is found to raise for every item.
    """

    def __init__(self, recipe: Recipe, *, on_broken: Callable[[str], Awaitable[None]]) -> None:
        self._on_broken = on_broken
        self._client = RewardClient(recipe.reward_url, retry_s=0.0, timeout_s=ANSWER_S, ca_file=recipe.tls.ca_file)
        self._timeout_s = recipe.buffer.heartbeat_timeout_s + PROBE_S
        self._state, self._note = "unknown", None
        self._answered_s = time.monotonic()
        self._has_answered = False
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self._run(), name="reward-probe")

    async def stop(self) -> None:
        """Ask no more; an answer that is under way is not waited for."""
        self._ending.set()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._client.close()

    def info(self) -> ComponentInfo:
        """The reward service as the last answers show it."""
        age_s = time.monotonic() - self._answered_s
        return ComponentInfo(
            component_id="reward",
            kind="reward",
            state=self._state,
            version=None,
            alive=self._has_answered and self._state != "unreachable" and age_s <= self._timeout_s,
            heartbeat_age_s=age_s,
            gauges={},
            note=self._note,
        )

    async def _run(self) -> None:
        while not self._ending.is_set():
            try:
                state, note = await self._ask()
            except Exception as error:  # a defect must show in the log, and must not end the task
                log.exception("reward_probe_failed")
                state, note = "unreachable", f"it cannot be asked ({type(error).__name__}); the buffer's log has more"
            if state != self._state:
                log.info("reward_state", state=state, note=note)
            self._state, self._note = state, note
            if state != "unreachable":
                self._answered_s, self._has_answered = time.monotonic(), True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), PROBE_S)

    async def _ask(self) -> tuple[str, str | None]:
        try:
            found = await in_thread(self._client.readiness)
        except ServiceError as error:
            return "unreachable", str(error)[:MAX_NOTE_CHARS]
        if found.problem is None:
            return "ready", None if found.note is None else found.note[:MAX_NOTE_CHARS]
        reason = str(found.problem)[:MAX_NOTE_CHARS]
        if isinstance(found.problem, BrokenRewardError):
            await self._on_broken(reason)
        return "not-ready", reason
