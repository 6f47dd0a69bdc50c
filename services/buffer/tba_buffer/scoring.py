"""Stored rollouts through the reward service: what the background scorer and re-scoring have in common.

    positions  ->  payloads from Redis  ->  items  ->  POST /v1/score (reward_link.py)  ->  new payloads  ->  score.lua

The items are those that a searcher sends: task, text and data of the prompt, text and finish reason of the response.
An item without a score is asked for again only if that may have been chance (it timed out, its process crashed, ...),
MAX_TRIES times in all; then its rollout is failed, with the reason. One whose scorer is away stays as it is, and is
asked for later (postponed.py). One whose request alone is not answered by a service that is up is set aside, and failed
in the end (refusals.py). A failed score is unknown, never a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.api import ScoreItem
from tba.api.scores import AWAY_REASONS, TRANSIENT_REASONS
from tba.clients import RewardClient
from tba.errors import BadRequestError, WireError
from tba.threads import in_thread
from tba.wire import Rollout, check_push, decode_rollout, encode_rollout
from tba_buffer import replica
from tba_buffer.context import Context
from tba_buffer.evictor import Evictor
from tba_buffer.log import CHANGE_DTYPE, STATUS_CODES
from tba_buffer.lost_payloads import shells
from tba_buffer.postponed import Postponed
from tba_buffer.prompts import Catalog
from tba_buffer.redis_link import redis_errors
from tba_buffer.refusals import Refusals
from tba_buffer.reward_link import RewardAwayError, RewardLink
from tba_buffer.view import IndexView

MAX_TRIES = 3
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and the version that gave it, or the reason why there is none."""

    reward: float | None = None
    version: str = ""
    reason: str = ""
    may_pass: bool = False
    """Whether the reason may have been chance: ask again at once."""
    is_away: bool = False
    """Whether the scorer was away: ask again later."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A stored rollout at one log position before and after it was scored; `payload` is the bytes of after."""

    position: int
    before: Rollout
    num_bytes_before: int
    after: Rollout
    payload: bytes
    is_unreadable: bool = False
    """Whether the stored bytes cannot be read: they stay, and only the log says that it has failed."""

    @property
    def is_first(self) -> bool:
        """Whether this is its first known reward (a failed rollout keeps the version of its last one)."""
        return self.after.reward is not None and self.before.reward_version is None


class Scoring:
    """Scores stored rollouts.

    Args:
        context: Redis and settings.
        catalog: names the prompts.
        view: the index.
        link: to the reward service.
        evictor: keeps the caps when new payloads are larger.
    """

    def __init__(
        self, context: Context, *, catalog: Catalog, view: IndexView, link: RewardLink, evictor: Evictor
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._view = view
        self._link = link
        self._evictor = evictor
        self.forget_positions()
        self._answered: ScoreItem | None = None
        """The last item that was scored."""

    def forget_positions(self) -> None:
        """Redis has lost data: its log positions are given out again, to rollouts that nobody has asked for yet."""
        self.refusals = Refusals(self._context.clock)
        """What the reward service cannot answer."""
        self.postponed = Postponed(self._context.clock)
        """What waits for its scorer."""

    def num_fitting(self, num_bytes: NDArray[np.integer]) -> int:
        """How many of these payloads, in order, one request may hold: at least one."""
        num_bytes = num_bytes[: self._link.num_items]
        fitting = np.cumsum(num_bytes, dtype=np.int64) <= self._context.recipe.reward.max_body_bytes
        return max(1, int(np.count_nonzero(fitting)))

    async def score(self, positions: Positions) -> list[Scored]:
        """Ask for the scores of the rollouts at these positions; those that are gone, or have to wait for their scorer,
        are left out. Who has stored those that were given up tells `postponed`.

        Raises:
            RewardAwayError: the reward service could not be asked.
            UnavailableError: Redis did not answer.
        """
        found, before, failed = await self._load(positions)
        if not found:
            return failed
        items = [self._item(rollout) for rollout in before]
        taken = [position for position, _ in found]
        try:
            scores = await self._ask(items)
            self._answered = next(
                (item for item, score in zip(items, scores, strict=True) if not score.reason), self._answered
            )
        except RewardAwayError as away:
            if not await self._is_given_up(taken, away):
                raise
            scores = [Score(reason=f"refused: {away}")]
        self.refusals.forget(taken)
        kept = {at for at, score in zip(taken, scores, strict=True) if not self._waits(at, score)}
        self.postponed.forget([at for at, score in zip(taken, scores, strict=True) if not score.is_away])
        self.keep_waiting()
        return failed + await in_thread(
            lambda: [
                _scored(position, rollout, len(payload), score)
                for (position, payload), rollout, score in zip(found, before, scores, strict=True)
                if position in kept
            ]
        )

    async def fail_unreadable(self, positions: NDArray[np.integer], payloads: Sequence[bytes]) -> bool:
        """Whether some of these payloads [n], of the scored rollouts at positions [n], cannot be read; they have failed
        from now on, so that nobody draws them again.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer.
        """
        damaged = [isinstance(item, WireError) for item in check_push(payloads)]
        if not any(damaged):
            return False
        async with self._context.mutating:
            _, _, failed = await self._load(np.unique(positions[damaged]).astype(np.int64))
            await self.store(failed)
        return True

    async def _load(self, positions: Positions) -> tuple[list[tuple[int, bytes]], list[Rollout], list[Scored]]:
        """What `_read` makes of the rollouts at these positions; those that are gone are left out."""
        index = await self._view.level()
        rows = index.rows_at(positions)
        positions, rollout_ids = positions[rows >= 0], index.rollout_ids(rows[rows >= 0])
        if not rollout_ids:
            return [], [], []
        instead = shells(index, rows[rows >= 0], run=self._context.run, catalog=self._catalog)
        with redis_errors("read rollouts"):
            stored = await self._context.redis.hmget(self._context.keys.payloads, rollout_ids)
        return await in_thread(lambda: self._read(positions, stored, instead))

    def _read(
        self, positions: Positions, stored: Sequence[bytes | None], instead: Sequence[Rollout]
    ) -> tuple[list[tuple[int, bytes]], list[Rollout], list[Scored]]:
        """(positions and payloads [n], their rollouts [n], and those that cannot be read, as failed)."""
        found, rollouts, failed = [], [], []
        for position, payload, shell in zip(positions.tolist(), stored, instead, strict=True):
            if payload is None:
                continue
            name = shell.rollout_id.hex()
            rollout = self._context.read_or_note("rollout", name, lambda payload=payload: decode_rollout(payload))
            if rollout is None:
                failed.append(Scored(position, shell, len(payload), shell, payload, is_unreadable=True))
            else:
                found.append((position, payload))
                rollouts.append(rollout)
        return found, rollouts, failed

    def _waits(self, position: int, score: Score) -> bool:
        return score.is_away and not self.postponed.note(position, score.reason)

    async def _ask(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One score per item; what failed by chance, perhaps, is asked for again."""
        scores = await self._link.ask(lambda client: request_scores(client, items))
        for _ in range(MAX_TRIES - 1):
            again = [at for at, score in enumerate(scores) if score.may_pass]
            if not again:
                break
            late = [items[at] for at in again]
            repeated = await self._link.ask(lambda client, late=late: request_scores(client, late))
            for at, score in zip(again, repeated, strict=True):
                scores[at] = score
        return scores

    async def _is_given_up(self, positions: Sequence[int], away: RewardAwayError) -> bool:
        """Whether this attempt failed because of its only item, and was the last one for it."""
        if len(positions) > 1 or not away.may_refuse:
            return False
        if self._answered is None:
            is_up = await self._link.known_tasks() is not None
        else:
            is_up = await self._link.scores(self._answered)
        if not is_up:
            return False
        is_given_up = self.refusals.note(positions[0], is_alone=self._answered is None)
        self._link.num_aside = len(self.refusals)
        return is_given_up

    def keep_waiting(self) -> None:
        """The wait goes on while something is set aside, and ends with the last one of it."""
        self.refusals.forget_old()
        self.postponed.forget_old()
        self._link.show_away(len(self.postponed))
        had, self._link.num_aside = self._link.num_aside, len(self.refusals)
        if had and not len(self.refusals):
            self._link.end_wait()

    async def live(self, scored: Sequence[Scored]) -> list[Scored]:
        """Those that are still stored; `context.mutating` must be held until they are stored.

        Raises:
            UnavailableError: Redis did not answer.
        """
        index = await self._view.level()
        rows = index.rows_at(np.array([item.position for item in scored], dtype=np.int64))
        found = [item for item, row in zip(scored, rows, strict=True) if row >= 0]
        ids = index.rollout_ids(rows[rows >= 0])  # a position that Redis has lost may be that of another rollout now
        return [item for item, id_ in zip(found, ids, strict=True) if item.before.rollout_id == id_]

    async def store(self, scored: Sequence[Scored], job: str | None = None) -> None:
        """Write new payloads, and with them the JSON of the re-scoring job, atomically; `context.mutating` is held.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer; both may have been written.
        """
        keys = self._context.keys
        reply = await self._context.scripts.run(
            "score",
            [keys.payloads, keys.log, keys.counters, keys.originals, keys.replica, *([keys.rescore] if job else [])],
            [
                self._context.replica.number,
                len(scored),
                *(part for item in scored for part in _arguments(item)),
                *([job] if job else []),
            ],
        )
        if reply == replica.SUPERSEDED:
            raise await replica.refusal(self._context, "storing new rewards")
        self._context.changed.notify()

    async def bound(self, scored: Sequence[Scored]) -> None:
        """Keep the caps after payloads were stored that may be larger; `context.mutating` is free again.

        Raises:
            UnavailableError: Redis did not answer.
        """
        if self._evictor.note(0, sum(len(item.payload) - item.num_bytes_before for item in scored)):
            await self._evictor.enforce()

    def _item(self, rollout: Rollout) -> ScoreItem:
        found = self._catalog.find(rollout.prompt_id)
        assert found is not None, (
            f"rollout {rollout.rollout_id.hex()} names prompt {rollout.prompt_id!r}, never uploaded"
        )
        prompt = found[1]
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
    """One score per item; what a request that is refused as a whole holds is asked for in halves.

    Raises:
        ServiceError: there was no usable answer.
    """
    try:
        results = client.score(items).results
    except BadRequestError as error:
        if len(items) == 1:
            return [Score(reason=f"refused: {error}")]
        half = len(items) // 2
        return request_scores(client, items[:half]) + request_scores(client, items[half:])
    scores = []
    for result in results:
        if result.error is None:
            scores.append(Score(reward=result.reward, version=result.reward_version or "unknown"))
        else:
            reason = f"{result.error.reason}: {result.error.detail}"
            is_away = result.error.reason in AWAY_REASONS
            may_pass = not is_away and result.error.reason in TRANSIENT_REASONS
            scores.append(Score(reason=reason, may_pass=may_pass, is_away=is_away))
    return scores


def _scored(position: int, before: Rollout, num_bytes_before: int, score: Score) -> Scored:
    if score.reward is None:
        after = before.with_failure(score.reason)
    else:
        after = before.with_reward(score.reward, score.version)
    return Scored(position, before, num_bytes_before, after, encode_rollout(after))


def _arguments(item: Scored) -> tuple[bytes, bytes, bytes, int]:
    reward = np.nan if item.after.reward is None else item.after.reward
    change = np.array(
        [(item.position, reward, len(item.payload), STATUS_CODES[item.after.reward_status])], dtype=CHANGE_DTYPE
    )
    return item.before.rollout_id, item.payload, change.tobytes(), 2 if item.is_unreadable else int(item.is_first)
