"""The connection to the reward service: one request at a time, patience while it is away, and the named wait.

An attempt that finds the service away or busy raises RewardAwayError, which says when to try again (back-off with
jitter). The wait of `buffer-scorer` in GET /v1/run begins with the first attempt and ends with the first answer. A
failed attempt halves the next request and an answer lets it grow by a quarter: completions of a slow reward, of which
the service cannot answer many in time, get through in small requests, and few attempts are wasted on larger ones.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from tba.api import ScoreItem, WaitInfo
from tba.clients import RewardClient
from tba.errors import BadReplyError, BusyError, ServiceError, UnavailableError
from tba.logs import get_logger
from tba.threads import in_thread
from tba.tokens import client_token, load_tokens
from tba_buffer.components import Components, HeldWait
from tba_buffer.context import Context
from tba_buffer.postponed import LONGEST_S

MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 10.0
ATTEMPT_S = 30.0
"""Deadline of one attempt, beside the time that the slowest items may take."""
SLACK_S = 10.0
"""What an attempt waits for the answer beyond the deadline that the reward service itself keeps."""
QUICK_S = 5.0
T = TypeVar("T")
log = get_logger("reward-link")


class RewardAwayError(Exception):
    """The reward service could not be asked; `pause_s` says when to try again.

    `may_refuse`: no answer, 5xx or a bad reply, which the request itself may be the cause of.
    """

    def __init__(self, message: str, pause_s: float, *, may_refuse: bool = False) -> None:
        super().__init__(message)
        self.pause_s = pause_s
        self.may_refuse = may_refuse


class RewardLink:
    """Asks the reward service.

    Args:
        context: the recipe.
        components: where the wait is shown.

    Raises:
        ConfigError: the tokens file is wrong.
    """

    owner = "buffer-scorer"

    def __init__(self, context: Context, components: Components) -> None:
        recipe = context.recipe
        tokens_file, ca_file = recipe.auth.tokens_file, recipe.tls.ca_file
        is_known = "searcher" in (load_tokens(tokens_file) or {})
        token = client_token(tokens_file, "searcher") if is_known else None
        self._components = components
        items_s = ATTEMPT_S + 2 * recipe.reward.item_timeout_s
        # a scorer may have a longer deadline of its own; the service answers by this one
        self._attempt_s = max(items_s, recipe.reward.request_deadline_s + SLACK_S)
        self._client = RewardClient(
            recipe.reward_url, token=token, ca_file=ca_file, retry_s=0.0, timeout_s=self._attempt_s
        )
        self._quick = RewardClient(recipe.reward_url, token=token, ca_file=ca_file, retry_s=0.0, timeout_s=QUICK_S)
        self._max_items = self._num_items = min(recipe.buffer.score_max_rollouts, recipe.reward.max_items)
        self._pause_s = MIN_PAUSE_S
        self._held: HeldWait | None = None
        self._wait, self._away_wait = ExitStack(), ExitStack()
        self._is_away_shown = False
        self._ending = asyncio.Event()
        self.problem: str | None = None
        """Why the last attempt failed; None after an answer."""
        self.num_aside = 0
        """Rollouts that still wait for an answer while others get theirs: the wait goes on for them."""

    @property
    def num_items(self) -> int:
        """How many completions the next request may hold."""
        return self._num_items

    @property
    def wait(self) -> WaitInfo | None:
        """The wait for an answer, if one is going on."""
        return None if self._held is None else self._held.info()

    def close(self) -> None:
        """Give up the request in flight, if any, and close the connections."""
        self._ending.set()
        self._client.close()
        self._quick.close()

    async def known_tasks(self) -> set[str] | None:
        """The tasks that can be scored; None when the service does not say so at once."""
        try:
            return {reward.task for reward in await in_thread(self._quick.rewards)}
        except ServiceError:
            return None

    async def scores(self, item: ScoreItem) -> bool:
        """Whether the service answers at once what it has answered before."""
        try:
            await in_thread(lambda: self._quick.score([item]))
        except ServiceError:
            return False
        return True

    async def ask(self, call: Callable[[RewardClient], T]) -> T:
        """One attempt at `call`, in a thread.

        Raises:
            RewardAwayError: there was no usable answer.
        """
        deadline_s = time.monotonic() + self._attempt_s
        if self._held is None:
            self._held = self._wait.enter_context(self._components.waiting(self.owner, "reward", deadline_s))
        self._held.deadline_s = deadline_s
        is_away = False
        try:
            return await self._unless_ending(in_thread(lambda: call(self._client)))
        except ServiceError as error:
            is_away = True
            self._held.name = error.wait if isinstance(error, BusyError) else "reward"
            raise self._away(error) from None
        finally:
            if not is_away:
                self.end_wait()

    async def _unless_ending(self, answer: Coroutine[Any, Any, T]) -> T:
        work, over = asyncio.create_task(answer), asyncio.create_task(self._ending.wait())
        await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if not work.done():
            work.cancel()
            raise RewardAwayError("the buffer service stops", 0.0)
        return work.result()

    def _away(self, error: ServiceError) -> RewardAwayError:
        if self.problem is None:
            log.warning("reward_away", detail=str(error))
        self.problem = str(error)
        self._num_items = max(1, self._num_items // 2)
        if isinstance(error, BusyError):
            return RewardAwayError(self.problem, min(error.retry_after_s, MAX_PAUSE_S))
        pause_s = random.uniform(0.5, 1.0) * self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return RewardAwayError(self.problem, pause_s, may_refuse=isinstance(error, UnavailableError | BadReplyError))

    def show_away(self, num: int) -> None:
        """So many rollouts wait for scorers that are away, while the reward service answers: a wait of its own."""
        if num and not self._is_away_shown:
            deadline_s = time.monotonic() + LONGEST_S
            self._away_wait.enter_context(self._components.waiting(self.owner, "scorer-away", deadline_s))
            log.warning("scorer_away", num_rollouts=num)
        elif self._is_away_shown and not num:
            self._away_wait.close()
            log.info("scorer_back")
        self._is_away_shown = num > 0

    def end_wait(self) -> None:
        """There was an answer, or the one that was waited for is given up."""
        if self.problem is not None:
            log.info("reward_back")
        self.problem, self._pause_s = None, MIN_PAUSE_S
        self._num_items = min(self._num_items + max(1, self._num_items // 4), self._max_items)
        if not self.num_aside:
            self._held = None
            self._wait.close()
