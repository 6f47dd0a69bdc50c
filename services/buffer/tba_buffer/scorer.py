"""The background scorer: gives rollouts that wait for their reward (pending) one, and works on the re-scoring job.

    every score_every_s, and at once while there is work:
        the oldest pending rollouts  ->  scored, failed with a reason, or postponed while their scorer is away
        one chunk of the re-scoring job, if one runs (rescore.py)

While the reward service is away nothing changes; the wait is that of `buffer-scorer` in GET /v1/run.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np

from tba.errors import SupersededError, UnavailableError
from tba.logs import get_logger
from tba_buffer.context import Context
from tba_buffer.rescore import Rescoring
from tba_buffer.reward_link import MAX_PAUSE_S, RewardAwayError, RewardLink
from tba_buffer.scoring import Scoring
from tba_buffer.view import IndexView

STOP_TIMEOUT_S = 5.0
log = get_logger("scorer")


class Scorer:
    """The task that scores.

    Args:
        context: Redis and settings.
        view: the index.
        scoring: scores rollouts and stores what became of them.
        rescoring: the re-scoring job.
        link: to the reward service; closed by `stop`.
    """

    def __init__(
        self, context: Context, *, view: IndexView, scoring: Scoring, rescoring: Rescoring, link: RewardLink
    ) -> None:
        self._context = context
        self._view = view
        self._scoring = scoring
        self._rescoring = rescoring
        self._link = link
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the index is built."""
        self._task = asyncio.create_task(self._run(), name="scorer")

    def forget_positions(self) -> None:
        """Redis has lost data: what is remembered by log position may be of other rollouts from now on."""
        self._scoring.forget_positions()
        self._rescoring.forget()

    async def stop(self) -> None:
        """End; what the reward service has not answered yet is asked again after the next start."""
        self._ending.set()  # not cancel: a command that redis-py has begun may swallow the cancellation
        self._link.close()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)

    async def _run(self) -> None:
        every_s = self._context.recipe.buffer.score_every_s
        while not self._ending.is_set():
            try:
                pending = await self._score_pending()
                again = await self._rescoring.advance()
                pause_s = 0.0 if pending or again else every_s
            except RewardAwayError as away:
                pause_s = away.pause_s
            except SupersededError as error:
                log.warning("scorer_ends", detail=str(error))
                return
            except UnavailableError as error:
                log.warning("redis_unavailable", detail=str(error))
                pause_s = every_s
            except Exception:  # a defect must show in the log, and must not end the scoring of everything else
                log.exception("scorer_failed")
                pause_s = MAX_PAUSE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)

    async def _score_pending(self) -> bool:
        """Score the oldest pending rollouts, those that are set aside later; answers whether any was."""
        self._scoring.keep_waiting()
        index = await self._view.level()
        if not index.num_pending or await self._rescoring.takes_pending():
            return False
        refusals, postponed, most = self._scoring.refusals, self._scoring.postponed, self._link.num_items
        rows = index.pending_rows(most + len(refusals) + len(postponed))
        waiting = postponed.first(index.column("position", rows).tolist(), most)
        chosen = np.array(refusals.first(waiting), dtype=np.int64)
        if not len(chosen):
            return False
        rows = index.rows_at(chosen)
        rows = rows[: self._scoring.num_fitting(index.column("num_bytes", rows))]
        asked = index.column("position", rows).astype(np.int64)
        scored = await self._scoring.score(asked)
        async with self._context.mutating:
            stored = await self._scoring.live(scored)
            await self._rescoring.store_pending(stored)
        postponed.forget([item.position for item in scored])
        await self._scoring.bound(stored)
        return bool(stored) or postponed.are_waiting(asked.tolist())
