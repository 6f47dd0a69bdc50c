"""Complete visits on their way to the buffer: scored, then pushed (training) or reported (evaluation).

    complete visits --score_forever--> scored visits --push_forever--> buffer

Each task reads from its own queue (the states of a visit: visits.py). If a request for scores takes much longer than
earlier ones, its visits are scored again by NUM_ALONE more tasks. Each visit then has its own request, so that one that
hangs does not delay the others. The tasks wait:

scoring   for visits; for a reward service that is away ("reward-unreachable", deadline SCORE_RETRY_S). After one such
          deadline each further visit is tried once, until the service answers again. A drain sends no requests.
          The starting model computes ref log-probs if the objective places them at the searcher.
pushing   for scored visits; for a buffer that is busy (the reply names the wait) or away ("buffer-unreachable",
          deadline RETRY_S, then the searcher ends with an error)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from tba.api import EvalResult, EvalResults, PushReply, ScoreItem, ScoreReply, ScoreResult
from tba.api.scores import ANSWER_REASONS, AWAY_REASONS, HANG_REASONS, MAX_SCORE_ITEMS
from tba.clients import BufferClient, RewardClient
from tba.concurrency import in_thread
from tba.config import Recipe
from tba.errors import BadReplyError, BadRequestError, ConflictError, NotFoundError, WaitTimeoutError
from tba.fields import is_bounded
from tba.logs import get_logger
from tba.versions import START
from tba.wire import RefLogprob, Rollout, encode_rollout, float32_bytes, new_rollout_id, single_turn
from tba.wire.rollout import RewardStatus, with_paid
from tba.wire.sequences import Episode, TokenSequence
from tba_searcher.engines.engine import Completion
from tba_searcher.engines.tokenizer import Codec
from tba_searcher.episodes.conversation import PlayedEpisode
from tba_searcher.generation.evaluation_results import Embedder, failed_result, result_of
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.visits import Visit
from tba_searcher.waits import RETRY_S, SCORE_RETRY_S, retry_until

if TYPE_CHECKING:  # searchers without a model run without torch
    from tba_searcher.engines.torch.reference_logprobs import StartingModel

T = TypeVar("T")
log = get_logger("delivery")
PUSH_MAX_ROLLOUTS = 256
"""Most rollouts in one push; the buffer takes up to 512."""
NUM_ALONE = 32
MIN_SLOW_S = 2.0
"""A request for scores counts as slow after this time, or after twice `Delivery._longest_s` if that is longer."""
_SLOW_REASONS = AWAY_REASONS | HANG_REASONS
_PUSH_OVERHEAD_BYTES, _ITEM_OVERHEAD_BYTES = 64, 5


def split_into_pushes(payloads: list[bytes], *, max_rollouts: int, max_bytes: int) -> list[list[bytes]]:
    """Split encoded rollouts into pushes within both limits; a rollout above `max_bytes` gets a push of its own."""
    pushes: list[list[bytes]] = []
    num_bytes = 0
    for payload in payloads:
        if not pushes or len(pushes[-1]) == max_rollouts or num_bytes + len(payload) > max_bytes:
            pushes.append([])
            num_bytes = 0
        pushes[-1].append(payload)
        num_bytes += len(payload) + _ITEM_OVERHEAD_BYTES
    return pushes


@dataclass(frozen=True, slots=True)
class _ScoredVisit:
    visit: Visit
    payloads: list[bytes]
    """Encoded rollouts; empty for an evaluation."""
    result: EvalResult | None = None
    """The result of an evaluation."""


@dataclass(frozen=True, slots=True)
class _Reward:
    """The fields of a rollout that say what it was worth."""

    status: RewardStatus
    reason: str | None = None
    reward: float | None = None
    version: str | None = None
    parts: dict[str, float] | None = None


def is_storable(completion: Completion | PlayedEpisode) -> bool:
    """Return whether there is something to store: an episode may have failed before its first reply."""
    return isinstance(completion, Completion) or bool(completion.sequences)


def known_reward(
    completion: Completion | PlayedEpisode, score: ScoreResult | str | None, *, is_asked: bool
) -> float | None:
    """Return what a completion of an evaluation is worth: its score, and what its environment paid."""
    known = score.reward if isinstance(score, ScoreResult) else None
    if isinstance(completion, Completion) or completion.failure is not None or (is_asked and known is None):
        return known
    paid = completion.episode.paid
    return paid if known is None else known + (paid or 0.0)


def last_reply_of(completion: Completion | PlayedEpisode) -> NDArray[np.int32]:
    """Return the tokens of the last reply, which is the response that scorers read."""
    if isinstance(completion, Completion):
        return completion.response_tokens
    start, end = completion.sequences[-1].trained_spans[-1]
    return completion.sequences[-1].tokens[start:end]


def sequences_of(visit: Visit, completion: Completion | PlayedEpisode) -> tuple[TokenSequence, ...]:
    """Return the token sequences of a completion."""
    if isinstance(completion, PlayedEpisode):
        return completion.sequences
    return single_turn(visit.prompt_tokens, completion.response_tokens, completion.finish_reason)


class Delivery:
    """Scores and pushes complete visits.

    `on_reply` gets every push reply, which carries the newest version and the run's state.

    Args:
        embedder: measures the embedding distance of evaluation samples; None: it is not measured.
        reference: computes the ref log-prob of every rollout; None: rollouts carry none.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        buffer: BufferClient,
        reward: RewardClient,
        codec: Codec,
        embedder: Embedder | None,
        reference: StartingModel | None,
        status: SearcherStatus,
    ) -> None:
        self._recipe, self._buffer, self._reward = recipe, buffer, reward
        self._codec, self._embedder, self._reference, self._status = codec, embedder, reference, status
        self.on_reply: Callable[[PushReply], None] | None = None
        self.on_short: Callable[[Visit], Awaitable[None]] | None = None
        """Called when a training visit is pushed with fewer rollouts than its lease asks for."""
        self._complete: asyncio.Queue[Visit] = asyncio.Queue()
        self._scored: asyncio.Queue[_ScoredVisit] = asyncio.Queue()
        self._open: set[str] = set()
        """Lease ids of the visits that are being scored or pushed."""
        self._unscored: dict[str, Visit] = {}
        """Visits whose scores are not known yet, by lease id."""
        self._alone: asyncio.Queue[Visit] = asyncio.Queue()
        self._score_requests: set[asyncio.Future[ScoreReply]] = set()
        self._longest_s = recipe.reward.request_deadline_s / 4
        """Decaying maximum of the time that requests for scores took; it starts high, as a scorer may be slow."""
        self._hanging: set[str] = set()
        """Ids of the prompts that a scorer hung on: each is logged only once."""
        self._reward_is_away = False
        self._is_draining = False
        self._token_tasks = {task for task in recipe.reward.tasks if recipe.reward.takes_tokens(task)}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being scored or pushed."""
        return not self._open

    @property
    def lease_ids(self) -> set[str]:
        """Lease ids of the visits that are being scored or pushed."""
        return set(self._open)

    def put(self, visit: Visit) -> None:
        """Queue a visit for scoring and delivery: it is complete, or cut short with at least one completion."""
        num = sum(is_storable(each) for each in visit.completions)
        self._status.counts["rollouts_generated"] += num
        if visit.pinned is None:
            self._status.num_unpushed += num
        self._open.add(visit.lease.lease_id)
        self._unscored[visit.lease.lease_id] = visit
        self._complete.put_nowait(visit)

    def put_failed(self, visit: Visit) -> None:
        """Queue the report of an evaluation whose prompt cannot be sampled; all its scores are unknown."""
        self._open.add(visit.lease.lease_id)
        self._scored.put_nowait(_ScoredVisit(visit, [], failed_result(visit)))

    def drain(self) -> list[Visit]:
        """Cancel requests for scores: unscored training rollouts are pushed as pending, evaluations are abandoned.

        Returns:
            The abandoned evaluations; the caller returns their leases.
        """
        self._is_draining = True
        abandoned = [visit for visit in self._unscored.values() if visit.pinned is not None]
        self._open.difference_update(visit.lease.lease_id for visit in abandoned)
        for request in self._score_requests:
            request.cancel()
        return abandoned

    async def score_forever(self) -> None:
        """Score complete visits, up to `PUSH_MAX_ROLLOUTS` rollouts together."""
        while True:
            visits = [await self._complete.get()]
            num = len(visits[0].completions)
            # no wait for more: a visit that is complete is scored at once
            while not self._complete.empty() and num < PUSH_MAX_ROLLOUTS:
                visits.append(self._complete.get_nowait())
                num += len(visits[-1].completions)
            await self._score(visits)

    async def score_alone_forever(self) -> None:
        """Score, one by one, the visits whose first request for scores was slow or found a scorer away."""
        while True:
            await self._score([await self._alone.get()], alone=True)

    async def push_forever(self) -> None:
        """Push scored visits together, and report evaluations."""
        while True:
            batch = [await self._scored.get()]
            while not self._scored.empty():
                batch.append(self._scored.get_nowait())
            await self._push([payload for item in batch for payload in item.payloads])
            await self._report([(item.visit, item.result) for item in batch if item.result is not None])
            for visit in (item.visit for item in batch if item.visit.pinned is None):
                if self.on_short is not None and not all(map(is_storable, visit.completions)):
                    await self.on_short(visit)
            self._open.difference_update(item.visit.lease.lease_id for item in batch)

    async def _score(self, visits: list[Visit], *, alone: bool = False) -> None:
        completions = [completion for visit in visits for completion in visit.completions]
        visit_of_completion = [visit for visit in visits for _ in visit.completions]
        plain = iter(self._codec.decode_responses([each for each in completions if isinstance(each, Completion)]))
        texts = [next(plain) if isinstance(each, Completion) else each.text for each in completions]
        # made once, before any retry: the buffer recognises a rollout that comes twice by its id
        ids = [new_rollout_id() for _ in completions]
        items = [
            ScoreItem(
                item_id=rollout_id.hex(),
                task=visit.lease.prompt.task,
                prompt=visit.lease.prompt.text,
                response=text,
                data=visit.lease.prompt.data,
                finish_reason=completion.finish_reason,
                # only Python functions take tokens (as `completion_ids`)
                response_tokens=last_reply_of(completion).tolist()
                if visit.lease.prompt.task in self._token_tasks
                else None,
            )
            for visit, completion, text, rollout_id in zip(visit_of_completion, completions, texts, ids, strict=True)
            if self._asks_scorers(visit, completion)
        ]
        found = await self._scores_in_time(items, None if alone else max(MIN_SLOW_S, 2 * self._longest_s))
        if found is None:
            for visit in visits:
                self._alone.put_nowait(visit)
            return
        by_id = dict(zip((item.item_id for item in items), found, strict=True))
        scores = [by_id.get(rollout_id.hex()) for rollout_id in ids]
        start = end = 0
        for visit in visits:
            start, end = end, end + len(visit.completions)
            errors = [each.error for each in scores[start:end] if isinstance(each, ScoreResult) and each.error]
            hung, prompt = next((each for each in errors if each.reason in HANG_REASONS), None), visit.lease.prompt
            if hung is not None and prompt.prompt_id not in self._hanging:
                self._hanging.add(prompt.prompt_id)
                log.warning("a scorer hangs", task=prompt.task, prompt_id=prompt.prompt_id, detail=hung.detail)
            if visit.lease.lease_id not in self._open:  # an evaluation that a drain has abandoned
                continue
            # another item of the request may be the cause, and an evaluation is scored now or never
            if visit.pinned is not None and not alone and any(each.reason in AWAY_REASONS for each in errors):
                self._alone.put_nowait(visit)
                continue
            if visit.pinned is None:
                refs = await self._ref_logprobs(visit)
                rollouts = [
                    self._rollout(visit, completions[i], ids[i], texts[i], scores[i], refs[i - start])
                    for i in range(start, end)
                    if is_storable(completions[i])
                ]
                scored = _ScoredVisit(visit, [encode_rollout(rollout) for rollout in rollouts])
            else:
                scored = _ScoredVisit(
                    visit, [], await self._evaluation_result(visit, texts[start:end], scores[start:end])
                )
            if visit.lease.lease_id in self._open:  # asked again: a drain may have begun during the awaits
                self._scored.put_nowait(scored)
            self._unscored.pop(visit.lease.lease_id, None)

    async def _scores_in_time(self, items: list[ScoreItem], slow_s: float | None) -> list[ScoreResult | str] | None:
        """Return one result per item as `_request_scores` does. After `slow_s` cancel the request and return None."""
        if not items:
            return []
        begin_s, request = time.monotonic(), asyncio.ensure_future(self._request_all_scores(items))
        try:
            if not (await asyncio.wait({request}, timeout=slow_s))[0]:
                return None
        finally:
            request.cancel()
        scores = request.result()
        if not any(isinstance(each, str) or (each.error and each.error.reason in _SLOW_REASONS) for each in scores):
            self._longest_s = max(time.monotonic() - begin_s, 0.9 * self._longest_s)
        return scores

    async def _request_all_scores(self, items: list[ScoreItem]) -> list[ScoreResult | str]:
        # one visit may have more completions than a request to the reward service may hold
        scores: list[ScoreResult | str] = []
        for start in range(0, len(items), MAX_SCORE_ITEMS):
            scores += await self._request_scores(items[start : start + MAX_SCORE_ITEMS])
        return scores

    async def _request_scores(self, items: list[ScoreItem]) -> Sequence[ScoreResult | str]:
        """Return for each item its result, or a text that says why it is not scored yet (pending)."""
        reason = "the searcher ended before the reward service answered"
        if self._is_draining:
            return self._pending(items, reason)
        request = asyncio.ensure_future(
            retry_until(
                lambda: self._reward.score(items),
                waits=self._status.waits,
                owner=f"scoring {items[0].item_id}",
                service="reward",
                # after one deadline each visit is tried once: rollouts must not pile up behind a service that is away
                deadline_s=0.0 if self._reward_is_away else SCORE_RETRY_S,
                renew_busy=False,
            )
        )
        self._score_requests.add(request)
        request.add_done_callback(self._score_requests.discard)
        try:
            reply = await request
        except asyncio.CancelledError:
            # `drain` cancels the request, and that ends here; a cancellation of this task must go through
            task = asyncio.current_task()
            if not self._is_draining or (task is not None and task.cancelling()):
                raise
        except WaitTimeoutError as error:
            if not self._reward_is_away:
                log.warning("reward service does not answer; rollouts are pushed unscored", detail=str(error))
            self._reward_is_away = True
            reason = f"the reward service did not answer for {SCORE_RETRY_S:g} s"
        except (BadRequestError, BadReplyError) as error:
            # the request may be too large, or one item may spoil the others
            if isinstance(error, BadRequestError) and len(items) > 1:
                half = len(items) // 2
                return [*await self._request_scores(items[:half]), *await self._request_scores(items[half:])]
            log.warning("scoring refused", detail=str(error), num_items=len(items))
            reason = f"the reward service refused the request: {error}"
        else:
            self._reward_is_away = False
            return list(reply.results)
        return self._pending(items, reason)

    def _pending(self, items: list[ScoreItem], reason: str) -> list[str]:
        self._status.counts["scores_pending"] += len(items)
        return [reason] * len(items)

    async def _evaluation_result(
        self, visit: Visit, texts: list[str], scores: Sequence[ScoreResult | str | None]
    ) -> EvalResult:
        rewards = [
            known_reward(each, score, is_asked=self._asks_scorers(visit, each))
            for each, score in zip(visit.completions, scores, strict=True)
        ]
        reasons = [score.error.reason for score in scores if isinstance(score, ScoreResult) and score.error]
        found = await in_thread(lambda: result_of(visit, texts, rewards, embedder=self._embedder))
        num_wrong, num_raised = sum(reason in ANSWER_REASONS for reason in reasons), reasons.count("exception")
        return found.model_copy(update={"num_wrong": num_wrong or None, "num_raised": num_raised or None})

    async def _ref_logprobs(self, visit: Visit) -> list[RefLogprob | None]:
        """Return the ref log-prob of every completion; None if the sum is not a bounded number."""
        if self._reference is None:
            return [None] * len(visit.completions)
        reference, sequences = self._reference, [sequences_of(visit, each) for each in visit.completions]
        sums = await in_thread(lambda: reference.sums(sequences))
        unknown = [value for value in sums if not is_bounded(value)]
        if unknown:
            # the rollout is pushed without one, and the trainer refuses it
            self._status.counts["ref_logprobs_unknown"] += len(unknown)
            log.error("ref log-probs are not bounded numbers", lease_id=visit.lease.lease_id, num_rollouts=len(unknown))
        return [RefLogprob.of(value, START) if is_bounded(value) else None for value in sums]

    def _rollout(
        self,
        visit: Visit,
        completion: Completion | PlayedEpisode,
        rollout_id: bytes,
        text: str,
        score: ScoreResult | str | None,
        ref_logprob: RefLogprob | None,
    ) -> Rollout:
        lease, reward = visit.lease, self._reward_of(visit, completion, score)
        return Rollout(
            rollout_id=rollout_id,
            run=self._recipe.run.name,
            task=lease.prompt.task,
            prompt_id=lease.prompt.prompt_id,
            visit_id=lease.visit_id,
            sequences=sequences_of(visit, completion),
            response_text=text,
            version_spans=completion.version_spans,
            sampling=completion.sampling,
            logprob_bytes=float32_bytes(completion.sampler_logprobs),
            ref_logprob=ref_logprob,
            reward=reward.reward,
            reward_status=reward.status,
            reward_reason=reward.reason,
            reward_version=reward.version,
            reward_parts=reward.parts,
            searcher_id=self._status.searcher_id,
            started_at_s=completion.started_at_s,
            finished_at_s=completion.finished_at_s,
            episode=completion.episode if isinstance(completion, PlayedEpisode) else None,
        )

    def _asks_scorers(self, visit: Visit, completion: Completion | PlayedEpisode) -> bool:
        """Return whether the reward service is asked about a completion."""
        if isinstance(completion, Completion):
            return True
        task = visit.lease.prompt.task
        is_scored = task not in self._recipe.paid_by_environment
        return is_scored and is_storable(completion) and completion.failure is None

    def _reward_of(
        self, visit: Visit, completion: Completion | PlayedEpisode, score: ScoreResult | str | None
    ) -> _Reward:
        """Return the reward of a completion: what its environment paid, and the score that was asked for."""
        if isinstance(completion, PlayedEpisode):
            failure, paid = completion.failure, completion.episode.paid
            if failure is None and score is None and paid is None:
                failure = "environment score: it has paid nothing, and its task has no scorer"
            if failure is not None:
                self._status.counts["scores_failed"] += not completion.episode.is_truncated
                return _Reward("failed", failure)
            if score is None:
                return _Reward("scored", reward=paid, version=completion.episode.environment_version)
        assert score is not None
        return self._score_of(visit, score, completion.episode if isinstance(completion, PlayedEpisode) else None)

    def _score_of(self, visit: Visit, score: ScoreResult | str, episode: Episode | None) -> _Reward:
        """Return a score of the reward service, and what the environment paid, as a reward."""
        if isinstance(score, str):
            return _Reward("pending", score)
        if score.error is not None and score.error.reason in AWAY_REASONS:
            # a scorer that is away says nothing about the response: the buffer scores it later
            self._status.counts["scores_pending"] += 1
            return _Reward("pending", f"{score.error.reason}: {score.error.detail}")
        if score.error is not None or score.reward is None:
            self._status.counts["scores_failed"] += 1
            detail = f"{score.error.reason}: {score.error.detail}" if score.error else "no reward in the reply"
            return _Reward("failed", detail, version=score.reward_version)
        is_composite = self._recipe.reward.is_composite(visit.lease.prompt.task)
        reward, parts = with_paid(score.reward, score.parts, episode, is_composite=is_composite)
        return _Reward("scored", reward=reward, version=score.reward_version or "unknown", parts=parts)

    async def _push(self, payloads: list[bytes]) -> None:
        pushes = split_into_pushes(
            payloads,
            max_rollouts=PUSH_MAX_ROLLOUTS,
            max_bytes=self._recipe.buffer.max_body_bytes - _PUSH_OVERHEAD_BYTES,
        )
        while pushes:
            push = pushes.pop(0)
            try:
                reply = await self._call_buffer(lambda push=push: self._buffer.push(push))
            except BadRequestError as error:
                if len(push) > 1:  # one rollout must not take the others with it
                    pushes[:0] = [push[: len(push) // 2], push[len(push) // 2 :]]
                    continue
                log.error("rollout refused", num_bytes=len(push[0]), reason=str(error))
                self._status.counts["rollouts_refused"] += 1
                self._status.num_unpushed -= 1
                continue
            self._status.num_unpushed -= len(push)
            for outcome in reply.outcomes:
                # a push is idempotent by rollout id: after a retry "duplicate" is the normal answer
                counter = {"new": "rollouts_pushed", "duplicate": "rollouts_duplicate"}.get(outcome.outcome)
                self._status.counts[counter or "rollouts_refused"] += 1
                if counter is None:
                    log.error("rollout refused", rollout_id=outcome.rollout_id, reason=outcome.reason)
            if self.on_reply is not None:
                self.on_reply(reply)

    async def _report(self, items: list[tuple[Visit, EvalResult]]) -> None:
        by_eval: dict[tuple[str, str], list[EvalResult]] = {}
        for visit, result in items:
            by_eval.setdefault((visit.lease.eval_id or "", str(visit.pinned)), []).append(result)
        for (eval_id, version), results in by_eval.items():
            await self._report_results(eval_id, version, results)

    async def _report_results(self, eval_id: str, version: str, results: list[EvalResult]) -> None:
        body = EvalResults(searcher_id=self._status.searcher_id, version=version, results=results)
        try:
            await self._call_buffer(lambda: self._buffer.eval_results(eval_id, body))
        except ConflictError as error:  # the evaluation has expired: this is no error of the searcher
            log.warning("evaluation results too late", eval_id=eval_id, detail=str(error))
        except (BadRequestError, NotFoundError) as error:
            # too large for the buffer or a proxy, or one result spoils the others
            if isinstance(error, BadRequestError) and len(results) > 1:
                half = len(results) // 2
                await self._report_results(eval_id, version, results[:half])
                await self._report_results(eval_id, version, results[half:])
                return
            log.error("evaluation result refused", eval_id=eval_id, lease_id=results[0].lease_id, detail=str(error))
            self._status.counts["evals_refused"] += len(results)
        else:
            self._status.counts["evals_reported"] += len(results)

    async def _call_buffer(self, call: Callable[[], T]) -> T:
        return await retry_until(call, waits=self._status.waits, owner="pushing", service="buffer", deadline_s=RETRY_S)
