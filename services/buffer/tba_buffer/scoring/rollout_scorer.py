"""Scores stored rollouts through the reward service, for the scoring worker and for re-scoring jobs.

    positions -> payloads from Redis -> items -> POST /v1/score (reward_service.py) -> new payloads -> score.lua

An item is the same as a searcher would send: task, text and data of the prompt, text and finish reason of the response.
A rollout whose scorer is away, or that gets no answer, is scored later (retries.py). A failed score is unknown, never a
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.api import ScoreItem
from tba.api.scores import AWAY_REASONS, MAX_SCORE_BODY_BYTES, TRANSIENT_REASONS
from tba.clients import RewardClient
from tba.concurrency import in_thread
from tba.errors import BadRequestError, WireError
from tba.logs import get_logger
from tba.wire import Rollout, encode_rollout, with_paid
from tba_buffer.eviction.evictor import Evictor
from tba_buffer.index.log import CHANGE_DTYPE, SCORED, STATUS_CODES
from tba_buffer.index.log_follower import IndexView
from tba_buffer.index.rollout_index import Index
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.rollouts.lost_payloads import decode_stored, placeholders
from tba_buffer.scoring.retries import RetryQueue
from tba_buffer.scoring.reward_service import RewardConnection, RewardUnavailableError
from tba_buffer.storage.context import Context
from tba_buffer.storage.redis_client import redis_errors

MAX_TRANSIENT_TRIES = 3
"""Most requests for one item whose error may be transient: a timeout, a crashed process, ..."""
log = get_logger("scorer")
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and the version that gave it, or the reason why there is none."""

    reward: float | None = None
    version: str = ""
    parts: Mapping[str, float] | None = None
    """The scores that make up the reward."""
    reason: str = ""
    """`REASON: DETAIL` of the error; empty with a reward."""

    @property
    def is_away(self) -> bool:
        """Whether the scorer was away: ask again later."""
        return self.reason.partition(":")[0] in AWAY_REASONS

    @property
    def is_transient(self) -> bool:
        """Whether the error may be transient: ask again at once."""
        return not self.is_away and self.reason.partition(":")[0] in TRANSIENT_REASONS


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A stored rollout at one log position before and after it was scored; `payload` encodes `after`."""

    position: int
    before: Rollout
    num_bytes_before: int
    after: Rollout
    payload: bytes
    is_damaged: bool = False
    """Whether the stored bytes cannot be read: they stay, and only the log says that the rollout has failed."""


class RolloutScorer:
    """Scores stored rollouts."""

    def __init__(
        self, context: Context, *, catalog: Catalog, view: IndexView, reward: RewardConnection, evictor: Evictor
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._view = view
        self._reward = reward
        self._evictor = evictor
        self.forget_positions()
        self._proven: ScoreItem | None = None
        """The last item that got a score. It is sent again, when another item gets no answer, to test the service."""

    def forget_positions(self) -> None:
        """Empty the retry queue: Redis has lost data, so its log positions may belong to other rollouts now."""
        self.retry_queue = RetryQueue(self._context.clock)

    def num_in_request(self, num_bytes: NDArray[np.integer]) -> int:
        """Return how many of the first payloads, with these sizes in bytes, one request may hold: at least one."""
        num_bytes = num_bytes[: self._reward.request_size]
        # payload bytes bound the size of the request body, which the service limits
        fitting = np.cumsum(num_bytes, dtype=np.int64) <= MAX_SCORE_BODY_BYTES
        return max(1, int(np.count_nonzero(fitting)))

    async def score(self, positions: Positions) -> list[ScoredRollout]:
        """Request the scores of the rollouts at these log positions, and return them; nothing is stored.

        Rollouts that are gone, or have to wait for their scorer, are left out. Damaged ones are returned as failed, and
        episodes that are scored or failed as they are. The caller removes from `retry_queue` those that it stored as
        given up.

        Raises:
            RewardUnavailableError: the reward service could not be asked.
        """
        found, before, decided = await self._load(positions)
        if not found:
            return decided
        items = [self._item(rollout) for rollout in before]
        taken = [position for position, _ in found]
        try:
            scores = await self._reward.ask(lambda client: request_scores(client, items))
            for _ in range(MAX_TRANSIENT_TRIES - 1):
                again = [at for at, score in enumerate(scores) if score.is_transient]
                if not again:
                    break
                late = [items[at] for at in again]
                repeated = await self._reward.ask(lambda client, late=late: request_scores(client, late))
                for at, score in zip(again, repeated, strict=True):
                    scores[at] = score
            self._proven = next(
                (item for item, score in zip(items, scores, strict=True) if not score.reason), self._proven
            )
        except RewardUnavailableError as error:
            # only an item that is alone in its request can be the cause
            if not await self._gives_up(taken, error):
                raise
            scores = [Score(reason=f"refused: {error}")]
        kept = {
            at
            for at, score in zip(taken, scores, strict=True)
            if not score.is_away or self.retry_queue.record_away(at, score.reason)
        }
        self.retry_queue.remove([at for at, score in zip(taken, scores, strict=True) if not score.is_away])
        self.update_waits(self._view.index)
        is_composite = self._context.recipe.reward.is_composite
        # in a thread: encoding a request of large payloads would hold up every other request
        return decided + await in_thread(
            lambda: [
                _scored(position, rollout, len(payload), score, is_composite=is_composite(rollout.task))
                for (position, payload), rollout, score in zip(found, before, scores, strict=True)
                if position in kept
            ]
        )

    async def fail_damaged(self, rollout_ids: Iterable[bytes]) -> None:
        """Store the unreadable ones among these rollouts as failed, so that no batch draws them again.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or answered with an error.
        """
        # no eviction or re-scoring may come between the look at the index and the write
        async with self._context.mutation_lock:
            index = await self._view.catch_up()
            rows = np.concatenate([index.row_of(rollout_id) for rollout_id in set(rollout_ids)])
            # the batch that was drawn before the first report has them too
            rows = rows[index.column("status", rows) == SCORED]
            _, _, decided = await self._load(index.column("position", rows).astype(np.int64))
            if damaged := [item for item in decided if item.is_damaged]:
                await self.store(damaged)

    async def _load(self, positions: Positions) -> tuple[list[tuple[int, bytes]], list[Rollout], list[ScoredRollout]]:
        """Load the rollouts at these positions as `_decode` returns them; those that are gone are left out."""
        index = await self._view.catch_up()
        rows = index.rows_at(positions)
        positions, rollout_ids = positions[rows >= 0], index.rollout_ids(rows[rows >= 0])
        if not rollout_ids:
            return [], [], []
        fallbacks = placeholders(index, rows[rows >= 0], run=self._context.run, catalog=self._catalog)
        with redis_errors("read rollouts"):
            stored = await self._context.redis.hmget(self._context.keys.payloads, rollout_ids)
        return await in_thread(lambda: self._decode(positions, stored, fallbacks))

    def _decode(
        self, positions: Positions, stored: Sequence[bytes | None], fallbacks: Sequence[Rollout]
    ) -> tuple[list[tuple[int, bytes]], list[Rollout], list[ScoredRollout]]:
        """Return (position, payload) pairs [n], their rollouts [n], and those that no scorer decides.

        These are the damaged ones, as failed `fallbacks`, and episodes that are scored or failed, as they are.
        """
        found, rollouts, decided = [], [], []
        for position, payload, fallback in zip(positions.tolist(), stored, fallbacks, strict=True):
            # evicted since the index was read
            if payload is None:
                continue
            try:
                rollouts.append(decode_stored(payload, fallback.rollout_id))
            except WireError as error:
                log.warning("damaged_rollout", rollout_id=fallback.rollout_id.hex(), reason=str(error))
                decided.append(ScoredRollout(position, fallback, len(payload), fallback, payload, is_damaged=True))
                continue
            # what its environment paid, or that it failed, no scorer can say again
            if rollouts[-1].episode is not None and rollouts[-1].reward_status != "pending":
                known = rollouts.pop()
                decided.append(ScoredRollout(position, known, len(payload), known, payload))
                continue
            found.append((position, payload))
        return found, rollouts, decided

    async def _gives_up(self, positions: Sequence[int], error: RewardUnavailableError) -> bool:
        """Return whether to give up the rollout of a failed request. Park it if it may be to blame; False: retry."""
        if len(positions) > 1 or not error.may_be_request:
            return False
        if self._proven is None:
            # nothing was ever scored, so no item can prove that the service scores
            is_up = await self._reward.known_tasks() is not None
        else:
            is_up = await self._reward.scores_quickly(self._proven)
        if not is_up:
            return False
        gives_up = self.retry_queue.record_silence(positions[0], is_unproven=self._proven is None)
        self._reward.num_parked = self.retry_queue.num_silent
        return gives_up

    def update_waits(self, index: Index) -> None:
        """Drop evicted rollouts from the retry queue, and end each shown wait that no rollout waits for."""
        self.retry_queue.remove_gone(index)
        self._reward.show_scorer_wait(self.retry_queue.num_away)
        had, self._reward.num_parked = self._reward.num_parked, self.retry_queue.num_silent
        if had and not self._reward.num_parked:
            self._reward.end_wait()

    async def still_stored(self, scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
        """Return the rollouts that are still stored; the caller holds `context.mutation_lock` until it stores them."""
        index = await self._view.catch_up()
        rows = index.rows_at(np.array([item.position for item in scored], dtype=np.int64))
        found = [item for item, row in zip(scored, rows, strict=True) if row >= 0]
        # a position that Redis has lost may belong to another rollout now: compare the ids
        ids = index.rollout_ids(rows[rows >= 0])
        return [item for item, id_ in zip(found, ids, strict=True) if item.before.rollout_id == id_]

    async def store(self, scored: Sequence[ScoredRollout], job: str | None = None) -> None:
        """Store scored rollouts and the re-scoring job's JSON in one atomic call, under `context.mutation_lock`.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer; both may have been written.
        """
        changes = np.array(
            [
                (
                    item.position,
                    np.nan if item.after.reward is None else item.after.reward,
                    len(item.payload),
                    STATUS_CODES[item.after.reward_status],
                )
                for item in scored
            ],
            dtype=CHANGE_DTYPE,
        )
        # the first known reward of a rollout: one that has failed keeps the version of its last one
        is_first = [item.after.reward is not None and item.before.reward_version is None for item in scored]
        await self._context.scripts.run(
            "score",
            *(item.payload for item in scored),
            ids=b"".join(item.before.rollout_id for item in scored),
            changes=changes.tobytes(),
            kinds=[2 if item.is_damaged else int(first) for item, first in zip(scored, is_first, strict=True)],
            job=job,
        )
        self.retry_queue.remove([item.position for item in scored])
        self._context.notify_all()

    async def enforce_limits(self, scored: Sequence[ScoredRollout]) -> None:
        """Evict rollouts if the scored payloads grew over the limits; `context.mutation_lock` must not be held."""
        if self._evictor.record_added(0, sum(len(item.payload) - item.num_bytes_before for item in scored)):
            await self._evictor.enforce()

    def _item(self, rollout: Rollout) -> ScoreItem:
        found = self._catalog.find(rollout.prompt_id)
        assert found is not None, (
            f"rollout {rollout.rollout_id.hex()} names prompt {rollout.prompt_id!r}, which was never uploaded"
        )
        prompt = found[1]
        # tokens are most of the bytes of an item: they are sent only to scorers that read them
        takes_tokens = self._context.recipe.reward.takes_tokens(prompt.task)
        return ScoreItem(
            item_id=rollout.rollout_id.hex(),
            task=prompt.task,
            prompt=prompt.text,
            response=rollout.response_text,
            data=prompt.data,
            finish_reason=rollout.finish_reason,
            response_tokens=rollout.response_tokens.tolist() if takes_tokens else None,
        )


def request_scores(client: RewardClient, items: Sequence[ScoreItem]) -> list[Score]:
    """Request the scores of items, and return one per item; halve a request that the service refuses.

    Raises:
        ServiceError: there was no usable answer.
    """
    try:
        results = client.score(items).results
    except BadRequestError as error:
        # one bad item makes the service refuse the whole request: ask for halves until it is alone
        if len(items) == 1:
            return [Score(reason=f"refused: {error}")]
        half = len(items) // 2
        return request_scores(client, items[:half]) + request_scores(client, items[half:])
    scores = []
    for result in results:
        if result.error is None:
            version = result.reward_version or "unknown"
            scores.append(Score(reward=result.reward, version=version, parts=result.parts))
        else:
            scores.append(Score(reason=f"{result.error.reason}: {result.error.detail}"))
    return scores


def _scored(
    position: int, before: Rollout, num_bytes_before: int, score: Score, *, is_composite: bool
) -> ScoredRollout:
    if score.reward is None:
        after = before.with_failure(score.reason)
    else:
        reward, parts = with_paid(score.reward, score.parts, before.episode, is_composite=is_composite)
        after = before.with_reward(reward, score.version, parts)
    return ScoredRollout(position, before, num_bytes_before, after, encode_rollout(after))
