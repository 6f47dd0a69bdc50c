"""The background task that scores pending rollouts and works on the re-scoring job.

    every SCORE_EVERY_S, and at once while there is work:
        the oldest pending rollouts  ->  scored, failed with a reason, or waiting while their scorer is away
        one chunk of the re-scoring job, if one runs (rescore.py)

While the reward service is away nothing changes; `buffer-scorer` in GET /v1/run shows the wait.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np

from tba.errors import SupersededError, UnavailableError
from tba.logs import get_logger
from tba_buffer.index.log_follower import IndexView
from tba_buffer.scoring.rescore import RescoreJobs
from tba_buffer.scoring.reward_service import MAX_PAUSE_S, RewardConnection, RewardUnavailableError
from tba_buffer.scoring.rollout_scorer import RolloutScorer
from tba_buffer.storage.context import Context

SCORE_EVERY_S = 1.0
"""How often the scorer looks for rollouts whose reward is unknown."""
STOP_TIMEOUT_S = 5.0
log = get_logger("scorer")


class ScoringWorker:
    """Runs the background task of this module."""

    def __init__(
        self,
        context: Context,
        *,
        view: IndexView,
        scorer: RolloutScorer,
        rescore_jobs: RescoreJobs,
        reward: RewardConnection,
    ) -> None:
        self._context = context
        self._view = view
        self._scorer = scorer
        self._rescore_jobs = rescore_jobs
        self._reward = reward
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task; the index must be built."""
        self._task = asyncio.create_task(self._run(), name="scorer")

    async def stop(self) -> None:
        """Stop the task and abandon the request in flight; the next start of the service repeats it."""
        self._stopping.set()  # not cancel: a command that redis-py has begun may swallow the cancellation
        self._reward.close()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)

    async def _run(self) -> None:
        every_s = SCORE_EVERY_S
        while not self._stopping.is_set():
            try:
                pending = await self._score_pending()
                again = await self._rescore_jobs.advance()
                pause_s = 0.0 if pending or again else every_s
            except RewardUnavailableError as error:
                pause_s = error.pause_s
            except SupersededError as error:
                log.warning("scoring_worker_ended", detail=str(error))
                return
            except UnavailableError as error:
                log.warning("redis_unavailable", detail=str(error))
                pause_s = every_s
            except Exception:  # a defect must show in the log, and must not end the scoring of everything else
                log.exception("scoring_worker_failed")
                pause_s = MAX_PAUSE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _score_pending(self) -> bool:
        """Score the oldest pending rollouts, parked ones later. Return whether there is more to do at once."""
        index = await self._view.catch_up()
        self._scorer.update_waits(index)
        # a job about pending rollouts scores them itself, and counts them
        if not index.num_pending or await self._rescore_jobs.scores_pending():
            return False
        retry_queue, request_size = self._scorer.retry_queue, self._reward.request_size
        # as many more as may have to wait: then the request is full without them
        rows = index.pending_rows(request_size + len(retry_queue))
        due = retry_queue.next_due(index.column("position", rows).tolist(), request_size)
        if not due:
            return False
        rows = index.rows_at(np.array(due, dtype=np.int64))
        rows = rows[: self._scorer.num_in_request(index.column("num_bytes", rows))]
        asked = index.column("position", rows).astype(np.int64)
        scored = await self._scorer.score(asked)
        async with self._context.mutation_lock:
            stored = await self._scorer.still_stored(scored)
            await self._scorer.store(stored)
        retry_queue.remove([item.position for item in scored])
        await self._scorer.enforce_limits(stored)
        return bool(stored) or retry_queue.is_too_early(asked.tolist())
