"""Re-scoring jobs: score all stored rollouts, or some of them, through the reward service again. One job at a time.

    start    record the log position; the job covers the matching rollouts that are stored up to it
    advance  score one chunk, oldest first; store payloads, log entry and progress in one atomic call (score.lua)

The progress is in Redis (`rescore`), so a restart continues after the last chunk that was stored, and no rollout counts
twice. The job and the index determine which rollouts are left. If the new score is an error, the rollout becomes
failed, since its old reward belongs to the old reward version. While the reward service or one of its scorers is away,
the job waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tba.api import RescoreInfo, RescoreRequest
from tba.errors import BadRequestError, ConflictError, NotFoundError, UnavailableError
from tba.logs import get_logger
from tba_buffer.index.log import STATUS_CODES
from tba_buffer.index.log_follower import IndexView
from tba_buffer.index.rollout_index import Index
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.scoring.reward_service import RewardConnection
from tba_buffer.scoring.rollout_scorer import Positions, RolloutScorer, ScoredRollout
from tba_buffer.storage.context import Context, needed
from tba_buffer.storage.redis_client import redis_errors

log = get_logger("rescore")


class RescoreJobs:
    """Runs the re-scoring jobs of the run, and remembers the last one."""

    def __init__(
        self, context: Context, *, catalog: Catalog, view: IndexView, scorer: RolloutScorer, reward: RewardConnection
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._view = view
        self._scorer = scorer
        self._reward = reward
        self._job: RescoreInfo | None = None
        self._is_loaded = False
        self._loading = asyncio.Lock()
        self._left: tuple[RescoreInfo, Positions] | None = None
        """A job, and the log positions that it has not scored yet; some of these rollouts may be evicted."""

    def forget(self) -> None:
        """Drop the job in memory, so that the next use reads it from Redis, which may have lost its progress."""
        self._job, self._is_loaded = None, False  # a chunk that is being scored belongs to no job any more

    async def info(self) -> RescoreInfo:
        """Return the running job, or the last one.

        Raises:
            NotFoundError: there never was one.
        """
        job = await self._read()
        if job is None:
            raise NotFoundError("no rescoring has been started in this run; start one with `tba rescore`")
        if job.state != "running":
            return job
        problem = self._reward.problem or self._scorer.retry_queue.problem
        return job.model_copy(update={"wait": self._reward.wait, "problem": problem})

    async def start(self, request: RescoreRequest) -> RescoreInfo:
        """Start a job. A request with the task and status of the running job returns that job.

        Raises:
            BadRequestError: no prompt has this task.
            ConflictError: another job runs, or no reward scores the task of a rollout that would be scored again.
        """
        tasks = {self._task(prompt_id) for prompt_id in self._catalog.ids}
        if request.task is not None and request.task not in tasks:
            names = ", ".join(sorted(tasks)) or "none"
            raise BadRequestError(f"no prompt of this run has the task {request.task!r}; its tasks: {names}")
        # before the lock is taken: the reward service may need seconds for the answer
        known_tasks = await self._reward.known_tasks()
        async with self._context.mutation_lock:
            running = await self._read()
            if running is not None and running.state == "running":
                if (running.task, running.only) == (request.task, request.only):
                    return await self.info()
                what = "everything" if running.only == "all" else f"what is {running.only}"
                raise ConflictError(
                    f"{what}{f' of task {running.task!r}' if running.task else ''} is being scored again since log "
                    f"position {running.start_position} ({running.num_done} of {running.num_total} done); wait for it"
                )
            index = await self._view.catch_up()
            job = RescoreInfo(
                state="running",
                task=request.task,
                only=request.only,
                started_at_s=self._context.clock(),
                start_position=index.position,
                num_total=0,
            )
            left = self._matching(index, job)
            # before anything is changed: without a reward every rollout of its task would become failed
            prompts = np.unique(index.column("prompt", index.rows_at(left)))
            scored_tasks = {self._task(self._catalog.ids[prompt]) for prompt in prompts}
            scored_tasks -= self._context.recipe.paid_by_environment
            if known_tasks is not None and not scored_tasks <= known_tasks:
                missing = ", ".join(sorted(scored_tasks - known_tasks))
                raise ConflictError(
                    f"the reward service has no reward for {missing}, so the stored rewards would "
                    f"be lost (it knows {', '.join(sorted(known_tasks))}); give the task an entry in "
                    "reward.tasks, or choose another one"
                )
            job = job.model_copy(update={"num_total": len(left)})
            # where nothing matches the job is done as it begins
            await self._write([], job if len(left) else self._ended(job, "done"))
        log.info("rescore_started", task=job.task, only=job.only, num_total=job.num_total)
        return await self.info()

    async def scores_pending(self) -> bool:
        """Return whether the running job scores pending rollouts only; the scoring worker then scores none."""
        job = await self._read()
        return job is not None and job.state == "running" and job.only == "pending"

    async def advance(self) -> bool:
        """Score and store the next chunk of the running job. Return False if no job runs, or it waits for a scorer.

        Raises:
            RewardUnavailableError: the reward service could not be asked; nothing has changed.
            SupersededError: a newer buffer process owns the run.
        """
        job = await self._read()
        if job is None or job.state != "running":
            return False
        index = await self._view.catch_up()
        # a scan of the index per chunk holds up the event loop; only a job about a status needs it: statuses change
        if self._left is None or self._left[0] is not job or job.only != "all":
            self._left = (job, self._matching(index, job))
        left = self._left[1]
        rows = index.rows_at(left[: self._reward.request_size])
        num_bytes = np.where(rows >= 0, index.column("num_bytes", rows), 0)
        taken, left = np.split(left, [self._scorer.num_in_request(num_bytes)])
        retry_queue, positions = self._scorer.retry_queue, taken.tolist()
        if retry_queue.is_too_early(positions):
            return False
        scored = await self._scorer.score(taken)
        if retry_queue.is_too_early(positions):  # the reward service answers the scored ones from its cache next time
            return False
        async with self._context.mutation_lock:
            if self._job is not job:  # Redis lost data meanwhile: written back, the job would go over what came after
                return True
            scored = await self._scorer.still_stored(scored)
            job = add_chunk(job, scored, taken, num_left=len(left))
            job = job if len(left) else self._ended(job, "done")
            await self._write(scored, job)
            self._left = (job, left)
        retry_queue.remove(positions)
        await self._scorer.enforce_limits(scored)
        return True

    def _matching(self, index: Index, job: RescoreInfo) -> Positions:
        """Return the log positions of the rollouts that the job has not scored yet, ascending."""
        rows = index.live_rows()
        positions = index.column("position", rows).astype(np.int64)
        matches = (positions > job.position) & (positions <= job.start_position)
        if job.only != "all":
            matches &= index.column("status", rows) == STATUS_CODES[job.only]
        if job.task is not None:
            is_task = np.array([self._task(prompt_id) == job.task for prompt_id in self._catalog.ids], dtype=bool)
            matches &= is_task[index.column("prompt", rows)]
        return positions[matches]

    def _task(self, prompt_id: str) -> str:
        found = self._catalog.find(prompt_id)
        assert found is not None, f"prompt {prompt_id!r} has a number but no content"
        return found[1].task

    def _ended(self, job: RescoreInfo, state: str) -> RescoreInfo:
        log.info("rescore_ended", state=state, num_done=job.num_done, num_changed=job.num_changed)
        return job.model_copy(update={"state": state, "finished_at_s": self._context.clock()})

    async def _read(self) -> RescoreInfo | None:
        async with self._loading:  # a slow reader must not bring back an older state of the job
            if not self._is_loaded:
                with redis_errors("read the re-scoring job"):
                    text = await self._context.redis.get(self._context.keys.rescore)
                key = self._context.keys.rescore
                self._job = text and needed(key, "rescore", lambda: RescoreInfo.model_validate_json(text))
                self._is_loaded = True
            return self._job

    async def _write(self, scored: Sequence[ScoredRollout], job: RescoreInfo) -> None:
        try:
            await self._scorer.store(scored, job.model_dump_json())
        except UnavailableError:
            self._is_loaded = False  # Redis may have stored it: ask what it has
            raise
        self._job = job


def add_chunk(job: RescoreInfo, scored: Sequence[ScoredRollout], taken: Positions, *, num_left: int) -> RescoreInfo:
    """Return the job after a chunk; `num_left` rollouts are left. Those at `taken` but not in `scored` are gone."""
    before = [item.before.reward for item in scored if item.before.reward is not None]
    after = [item.after.reward for item in scored if item.after.reward is not None]
    versions = Counter(job.reward_versions)
    versions.update(item.after.reward_version or "" for item in scored if item.after.reward is not None)
    num_done = job.num_done + len(scored)
    # a pending rollout that is scored meanwhile may join a job about scored ones
    num_total = max(job.num_total, num_done + num_left)
    return job.model_copy(
        update={
            "position": int(taken[-1]) if len(taken) else job.position,
            "num_total": num_total,
            "num_done": num_done,
            "num_changed": job.num_changed + sum(item.before.reward != item.after.reward for item in scored),
            "num_failed": job.num_failed + len(scored) - len(after),
            "num_gone": num_total - num_done - num_left,
            "num_known_before": job.num_known_before + len(before),
            "num_known_after": job.num_known_after + len(after),
            "mean_reward_before": _mean(job.mean_reward_before, job.num_known_before, before),
            "mean_reward_after": _mean(job.mean_reward_after, job.num_known_after, after),
            "reward_versions": dict(versions),
        }
    )


def _mean(mean: float | None, num: int, more: Sequence[float]) -> float | None:
    return ((mean or 0.0) * num + sum(more)) / (num + len(more)) if num + len(more) else None
