"""The reward service as the buffer sees it: the connection that asks for scores, and the probe of its readiness.

An attempt that finds the service away or busy raises RewardUnavailableError, which says when to try again (back-off
with jitter). The wait of `buffer-scorer` in GET /v1/run begins with the first attempt and ends with the first answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

from tba.api import ComponentInfo, ScoreItem, WaitInfo
from tba.clients import RewardClient
from tba.clients.service_client import error_of
from tba.concurrency import in_thread
from tba.config import Recipe
from tba.errors import BadReplyError, BrokenRewardError, BusyError, ServiceError, UnavailableError
from tba.logs import get_logger
from tba.tokens import client_token, load_tokens
from tba_buffer.run.component_times import HEARTBEAT_TIMEOUT_S
from tba_buffer.run.components import Components, HeldWait
from tba_buffer.scoring.retries import LONGEST_WAIT_S
from tba_buffer.storage.context import Context

MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 10.0
SLACK_S = 10.0
"""How long an attempt waits for the answer beyond the deadline that the reward service itself keeps."""
QUICK_S = 5.0
SCORE_MAX_ROLLOUTS = 256
"""Most completions of one request."""
PROBE_S = 5.0
PROBE_TIMEOUT_S = 5.0
MAX_NOTE_CHARS = 2000
T = TypeVar("T")
log = get_logger("reward-connection")


class RewardUnavailableError(Exception):
    """The reward service gave no usable answer; wait `pause_s` seconds before the next attempt.

    `may_be_request`: whether the request may be the cause, since there was no answer, a 5xx or a bad reply.
    """

    def __init__(self, message: str, pause_s: float, *, may_be_request: bool = False) -> None:
        super().__init__(message)
        self.pause_s = pause_s
        self.may_be_request = may_be_request


class RewardConnection:
    """Asks the reward service, one request at a time.

    Raises:
        ConfigError: the tokens file is wrong.
    """

    owner = "buffer-scorer"

    def __init__(self, context: Context, components: Components) -> None:
        recipe = context.recipe
        tokens_file, ca_file = recipe.auth.tokens_file, recipe.tls.ca_file
        # a reward service that checks tokens takes the searcher's; without one in the file it is asked without
        is_known = "searcher" in (load_tokens(tokens_file) or {})
        token = client_token(tokens_file, "searcher") if is_known else None
        self._components = components
        self._attempt_s = recipe.reward.request_deadline_s + SLACK_S
        self._client = RewardClient(
            recipe.reward_url, token=token, ca_file=ca_file, retry_s=0.0, timeout_s=self._attempt_s
        )
        self._quick = RewardClient(recipe.reward_url, token=token, ca_file=ca_file, retry_s=0.0, timeout_s=QUICK_S)
        self.request_size = SCORE_MAX_ROLLOUTS
        """How many completions the next request may hold."""
        self._pause_s = MIN_PAUSE_S
        self._held: HeldWait | None = None
        self._wait, self._scorer_wait = ExitStack(), ExitStack()
        self._has_scorer_wait = False
        self._stopping = asyncio.Event()
        self.problem: str | None = None
        """Why the last attempt failed; None after an answer."""
        self.num_parked = 0
        """Number of parked rollouts; while there are any, `wait` continues although other rollouts get answers."""

    @property
    def wait(self) -> WaitInfo | None:
        """The current wait for the reward service, or None."""
        return None if self._held is None else self._held.info()

    def close(self) -> None:
        """Abandon the request in flight, if any, and close the connections."""
        self._stopping.set()
        self._client.close()
        self._quick.close()

    async def known_tasks(self) -> set[str] | None:
        """Ask which tasks can be scored, and return them; None when the service does not answer within QUICK_S."""
        try:
            return {reward.task for reward in await in_thread(self._quick.rewards)}
        except ServiceError:
            return None

    async def scores_quickly(self, item: ScoreItem) -> bool:
        """Return whether the service answers within QUICK_S for an item that it has answered before."""
        try:
            await in_thread(lambda: self._quick.score([item]))
        except ServiceError:
            return False
        return True

    async def ask(self, call: Callable[[RewardClient], T]) -> T:
        """Run `call` once, in a thread, and return its result; begin or end `wait`, and adapt `request_size`.

        Raises:
            RewardUnavailableError: there was no usable answer, or `close` was called.
        """
        deadline_s = time.monotonic() + self._attempt_s
        if self._held is None:
            self._held = self._wait.enter_context(self._components.waiting(self.owner, "reward", deadline_s))
        self._held.deadline_s = deadline_s
        work = asyncio.create_task(in_thread(lambda: call(self._client)))
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not work.done():
            work.cancel()  # its thread cannot be stopped: `close` ends the request
            self.end_wait()
            raise RewardUnavailableError("the buffer service stops", 0.0)
        error = work.exception()
        if not isinstance(error, ServiceError):  # an answer, or a defect
            self.end_wait()
            return work.result()
        if self.problem is None:
            log.warning("reward_unavailable", detail=str(error))
        self.problem = str(error)
        # a slow reward may be unable to answer many completions in time: smaller requests get through
        self.request_size = max(1, self.request_size // 2)
        # a busy service says itself when to come again
        if isinstance(error, BusyError):
            self._held.name = error.wait
            raise RewardUnavailableError(self.problem, min(error.retry_after_s, MAX_PAUSE_S))
        self._held.name = "reward"
        pause_s = random.uniform(0.5, 1.0) * self._pause_s  # jitter
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        may_be_request = isinstance(error, UnavailableError | BadReplyError)
        raise RewardUnavailableError(self.problem, pause_s, may_be_request=may_be_request)

    def show_scorer_wait(self, num: int) -> None:
        """Begin the wait `scorer-away` if `num` rollouts wait for scorers that are away; end it if `num` is 0."""
        if num and not self._has_scorer_wait:
            deadline_s = time.monotonic() + LONGEST_WAIT_S
            self._scorer_wait.enter_context(self._components.waiting(self.owner, "scorer-away", deadline_s))
            log.warning("scorer_unavailable", num_rollouts=num)
        elif self._has_scorer_wait and not num:
            self._scorer_wait.close()
            log.info("scorer_available")
        self._has_scorer_wait = num > 0

    def end_wait(self) -> None:
        """Forget the failed attempts and allow larger requests; end `wait` unless rollouts are parked."""
        if self.problem is not None:
            log.info("reward_available")
        self.problem, self._pause_s = None, MIN_PAUSE_S
        self.request_size = min(self.request_size + max(1, self.request_size // 4), SCORE_MAX_ROLLOUTS)
        if not self.num_parked:
            self._held = None
            self._wait.close()


class RewardProbe:
    """Asks for /readyz of the reward service every PROBE_S, in the background; `info` returns the last answer.

    Args:
        recipe: says where the reward service is.
        on_broken: awaited with the reason each time /readyz says that a scorer raises an error for every item.
    """

    def __init__(self, recipe: Recipe, *, on_broken: Callable[[str], Awaitable[None]]) -> None:
        self._on_broken = on_broken
        self._client = RewardClient(
            recipe.reward_url, retry_s=0.0, timeout_s=PROBE_TIMEOUT_S, ca_file=recipe.tls.ca_file
        )
        self._timeout_s = HEARTBEAT_TIMEOUT_S + PROBE_S
        self._state, self._note = "unknown", None
        self._answered_s = time.monotonic()
        self._has_answered = False
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the background task."""
        self._task = asyncio.create_task(self._run(), name="reward-probe")

    async def stop(self) -> None:
        """Stop the background task, without waiting for an answer that is under way."""
        self._stopping.set()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._client.close()

    def info(self) -> ComponentInfo:
        """Return the state of the reward service from the last answers, without a request."""
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
        while not self._stopping.is_set():
            try:
                state, note = await self._ask()
            except Exception as error:  # a defect must show in the log, and must not end the task
                log.exception("reward_probe_failed")
                state, note = "unreachable", f"the request failed ({type(error).__name__}); the buffer's log says why"
            if state != self._state:
                log.info("reward_state", state=state, note=note)
            self._state, self._note = state, note
            if state != "unreachable":
                self._answered_s, self._has_answered = time.monotonic(), True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), PROBE_S)

    async def _ask(self) -> tuple[str, str | None]:
        try:
            reply = await in_thread(lambda: self._client.ask("/readyz"))
        except ServiceError as error:
            return "unreachable", str(error)[:MAX_NOTE_CHARS]
        if reply.status == 200:
            # what a ready service says beside, such as that a scorer is away
            try:
                return "ready", str(json.loads(reply.content)["note"])[:MAX_NOTE_CHARS]
            except (ValueError, KeyError, TypeError):
                return "ready", None
        problem = error_of(reply)
        reason = str(problem)[:MAX_NOTE_CHARS]
        # a scorer that raises for every item: nothing could ever be trained on, however long the run waits
        if isinstance(problem, BrokenRewardError):
            await self._on_broken(reason)
        return "not-ready", reason
