"""From complete visits to the buffer: score, then push (training) or report (evaluation). Two tasks, two queues.

complete visits --scoring--> scored visits --pushing--> buffer

scoring   asks the reward service, and the starting model for ref log-probs where the objective places them here;
          waits for visits; while the reward service is away ("reward-unreachable", deadline score_retry_s; after
          one such deadline further visits are tried once each, until the service answers again; in a hurry nobody
          is asked)
pushing   waits for scored visits; while the buffer is busy (the wait it names) or away ("buffer-unreachable",
          deadline retry_s, then the searcher ends with an error)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tba.api import EvalResult, EvalResults, PushReply, ScoreItem, ScoreReply, ScoreResult
from tba.api.scores import AWAY_REASONS
from tba.clients import BufferClient, RewardClient
from tba.config import Recipe
from tba.errors import BadReplyError, BadRequestError, ConflictError, NotFoundError, WaitTimeoutError
from tba.logs import get_logger
from tba.numbers import is_bounded
from tba.threads import in_thread
from tba.versions import START
from tba.wire import RefLogprob, Rollout, encode_rollout, new_rollout_id
from tba_searcher.engines.base import Completion
from tba_searcher.evaluating import Measures, unknown_result
from tba_searcher.status import Status
from tba_searcher.text import Codec
from tba_searcher.visits import Visit
from tba_searcher.waits import patiently

if TYPE_CHECKING:  # searchers without a model run without torch
    from tba_searcher.reference import StartingModel

T = TypeVar("T")
log = get_logger("delivery")
_PUSH_OVERHEAD_BYTES, _ITEM_OVERHEAD_BYTES = 64, 5


def push_parts(payloads: list[bytes], *, max_rollouts: int, max_bytes: int) -> list[list[bytes]]:
    """Cut encoded rollouts into pushes within both limits; a rollout that is too large alone gets a push of its own."""
    parts: list[list[bytes]] = []
    num_bytes = 0
    for payload in payloads:
        if not parts or len(parts[-1]) == max_rollouts or num_bytes + len(payload) > max_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(payload)
        num_bytes += len(payload) + _ITEM_OVERHEAD_BYTES
    return parts


@dataclass(frozen=True, slots=True)
class _Scored:
    visit: Visit
    payloads: list[bytes]
    """Encoded rollouts; none for an evaluation."""
    result: EvalResult | None = None
    """Of an evaluation."""


class Delivery:
    """Scores and pushes complete visits.

    `on_reply` is told about every push reply, which carries the newest version and the run's state.

    Args:
        reference: computes the ref log-prob of every rollout; None: rollouts carry none.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        buffer: BufferClient,
        reward: RewardClient,
        codec: Codec,
        measures: Measures,
        reference: StartingModel | None,
        status: Status,
    ) -> None:
        self._recipe, self._buffer, self._reward = recipe, buffer, reward
        self._codec, self._measures, self._reference, self._status = codec, measures, reference, status
        self.on_reply: Callable[[PushReply], None] | None = None
        self._complete: asyncio.Queue[Visit] = asyncio.Queue()
        self._scored: asyncio.Queue[_Scored] = asyncio.Queue()
        self._open: set[str] = set()
        self._unscored: dict[str, Visit] = {}
        """By lease id: visits whose scores are not known yet."""
        self._asking: asyncio.Future[ScoreReply] | None = None
        self._reward_is_away = False
        self._in_hurry = False

    @property
    def idle(self) -> bool:
        """Nothing is being scored or pushed."""
        return not self._open

    @property
    def lease_ids(self) -> set[str]:
        """Leases of the visits that are being scored or pushed."""
        return set(self._open)

    def put(self, visit: Visit) -> None:
        """Take over a visit (complete, or cut short by a drain) with at least one completion."""
        self._open.add(visit.lease.lease_id)
        self._unscored[visit.lease.lease_id] = visit
        self._complete.put_nowait(visit)

    def hurry(self) -> list[Visit]:
        """Wait for scores no longer: training rollouts go on without (pending), evaluations are given up.

        Returns:
            The evaluations; the caller returns their leases.
        """
        self._in_hurry = True
        lost = [visit for visit in self._unscored.values() if visit.pinned is not None]
        self._open.difference_update(visit.lease.lease_id for visit in lost)
        if self._asking is not None:
            self._asking.cancel()
        return lost

    def put_unknown(self, visit: Visit) -> None:
        """Report an evaluation whose prompt cannot be sampled: all its scores are unknown."""
        self._open.add(visit.lease.lease_id)
        self._scored.put_nowait(_Scored(visit, [], unknown_result(visit)))

    async def score_forever(self) -> None:
        """Score visits, as many at once as fit into one push."""
        while True:
            visits = [await self._complete.get()]
            num = len(visits[0].completions)
            while not self._complete.empty() and num < self._recipe.searcher.push_max_rollouts:
                visits.append(self._complete.get_nowait())
                num += len(visits[-1].completions)
            await self._score(visits)

    async def push_forever(self) -> None:
        """Push scored visits together, and report evaluations."""
        while True:
            batch = [await self._scored.get()]
            while not self._scored.empty():
                batch.append(self._scored.get_nowait())
            await self._push([payload for item in batch for payload in item.payloads])
            await self._report([(item.visit, item.result) for item in batch if item.result is not None])
            self._open.difference_update(item.visit.lease.lease_id for item in batch)

    async def _score(self, visits: list[Visit]) -> None:
        completions = [completion for visit in visits for completion in visit.completions]
        owners = [visit for visit in visits for _ in visit.completions]
        texts = self._codec.decode_responses(completions)
        ids = [new_rollout_id() for _ in completions]
        items = [
            ScoreItem(
                item_id=rollout_id.hex(),
                task=visit.lease.prompt.task,
                prompt=visit.lease.prompt.text,
                response=text,
                data=visit.lease.prompt.data,
                finish_reason=completion.finish_reason,
                response_tokens=self._tokens(visit, completion),
            )
            for visit, completion, text, rollout_id in zip(owners, completions, texts, ids, strict=True)
        ]
        most, results = self._recipe.reward.max_items, list[ScoreResult | str]()
        for start in range(0, len(items), most):
            results += await self._results(items[start : start + most])
        at = end = 0
        for visit in visits:
            at, end = end, end + len(visit.completions)
            if visit.lease.lease_id not in self._open:  # an evaluation that was given up
                continue
            if visit.pinned is None:
                refs = await self._ref_logprobs(visit)
                rollouts = [
                    self._rollout(visit, i - at, ids[i], texts[i], results[i], refs[i - at]) for i in range(at, end)
                ]
                scored = _Scored(visit, [encode_rollout(rollout) for rollout in rollouts])
            else:
                rewards = [result.reward if isinstance(result, ScoreResult) else None for result in results[at:end]]
                scored = _Scored(visit, [], await self._measured(visit, texts[at:end], rewards))
            if visit.lease.lease_id in self._open:
                self._scored.put_nowait(scored)
            self._unscored.pop(visit.lease.lease_id, None)

    def _tokens(self, visit: Visit, completion: Completion) -> list[int] | None:
        """What a Python function gets as `completion_ids`; other scorers are not sent what they make no use of."""
        if not self._recipe.reward.takes_tokens(visit.lease.prompt.task):
            return None
        return completion.response_tokens.tolist()

    async def _results(self, items: list[ScoreItem]) -> Sequence[ScoreResult | str]:
        """One result per item, or one reason per item why it is not scored yet."""
        reason = "the searcher ended before the reward service answered"
        if self._in_hurry:
            return self._pending(items, reason)
        self._asking = asyncio.ensure_future(
            patiently(
                lambda: self._reward.score(items),
                waits=self._status.waits,
                owner="scoring",
                service="reward",
                deadline_s=0.0 if self._reward_is_away else self._recipe.searcher.score_retry_s,
                renew_busy=False,
            )
        )
        try:
            reply = await self._asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._in_hurry or (task is not None and task.cancelling()):
                raise
        except WaitTimeoutError as error:
            if not self._reward_is_away:
                log.warning("reward service is away; rollouts are pushed unscored", detail=str(error))
            self._reward_is_away = True
            reason = f"the reward service did not answer for {self._recipe.searcher.score_retry_s:g} s"
        except (BadRequestError, BadReplyError) as error:
            if (
                isinstance(error, BadRequestError) and len(items) > 1
            ):  # too large, or one must not take the others along
                half = len(items) // 2
                return [*await self._results(items[:half]), *await self._results(items[half:])]
            log.warning("scoring refused", detail=str(error), num_items=len(items))
            reason = f"the reward service refused the request: {error}"
        else:
            self._reward_is_away = False
            return list(reply.results)
        return self._pending(items, reason)

    def _pending(self, items: list[ScoreItem], reason: str) -> list[str]:
        self._status.counts["scores_pending"] += len(items)
        return [reason] * len(items)

    async def _measured(self, visit: Visit, texts: list[str], rewards: list[float | None]) -> EvalResult:
        return await in_thread(lambda: self._measures.result(visit, texts, rewards))

    async def _ref_logprobs(self, visit: Visit) -> list[RefLogprob | None]:
        """Of every completion; one that is no bounded number stays unknown, and the trainer refuses that rollout."""
        if self._reference is None:
            return [None] * len(visit.completions)
        responses = [completion.response_tokens for completion in visit.completions]
        reference, prompts = self._reference, [visit.prompt_tokens] * len(responses)
        sums = await in_thread(lambda: reference.sums(prompts, responses))
        unknown = [value for value in sums if not is_bounded(value)]
        if unknown:
            self._status.counts["ref_logprobs_unknown"] += len(unknown)
            log.error("ref log-probs are no bounded numbers", lease_id=visit.lease.lease_id, num_rollouts=len(unknown))
        return [RefLogprob(value=value, version=START) if is_bounded(value) else None for value in sums]

    def _rollout(
        self,
        visit: Visit,
        index: int,
        rollout_id: bytes,
        text: str,
        result: ScoreResult | str,
        ref_logprob: RefLogprob | None,
    ) -> Rollout:
        completion, lease = visit.completions[index], visit.lease
        if isinstance(result, str):
            status, reason, reward, reward_version = "pending", result, None, None
        elif result.error is not None and result.error.reason in AWAY_REASONS:
            self._status.counts["scores_pending"] += 1
            reason = f"{result.error.reason}: {result.error.detail}"
            status, reward, reward_version = "pending", None, None
        elif result.error is not None or result.reward is None:
            self._status.counts["scores_failed"] += 1
            detail = f"{result.error.reason}: {result.error.detail}" if result.error else "no reward in the reply"
            status, reason, reward, reward_version = "failed", detail, None, result.reward_version
        else:
            status, reason, reward, reward_version = "scored", None, result.reward, result.reward_version or "unknown"
        return Rollout(
            rollout_id=rollout_id,
            run=self._recipe.run.name,
            task=lease.prompt.task,
            prompt_id=lease.prompt.prompt_id,
            visit_id=lease.visit_id,
            prompt_tokens=np.array(visit.prompt_tokens, np.int32),
            response_tokens=completion.response_tokens,
            response_text=text,
            finish_reason=completion.finish_reason,
            version_spans=completion.version_spans,
            sampling=completion.sampling,
            sampler_logprobs=completion.sampler_logprobs,
            ref_logprob=ref_logprob,
            reward=reward,
            reward_status=status,
            reward_reason=reason,
            reward_version=reward_version,
            searcher_id=self._status.searcher_id,
            started_at_s=completion.started_at_s,
            finished_at_s=completion.finished_at_s,
        )

    async def _push(self, payloads: list[bytes]) -> None:
        parts = push_parts(
            payloads,
            max_rollouts=self._recipe.searcher.push_max_rollouts,
            max_bytes=self._recipe.buffer.max_body_bytes - _PUSH_OVERHEAD_BYTES,
        )
        while parts:
            part = parts.pop(0)
            try:
                reply = await self._to_buffer(lambda part=part: self._buffer.push(part))
            except BadRequestError as error:
                if len(part) > 1:  # one item must not take the others with it
                    parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
                    continue
                log.error("rollout refused", num_bytes=len(part[0]), reason=str(error))
                self._status.counts["rollouts_refused"] += 1
                self._status.num_unpushed -= 1
                continue
            self._status.num_unpushed -= len(part)
            for outcome in reply.outcomes:
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
            body = EvalResults(searcher_id=self._status.searcher_id, version=version, results=results)
            try:
                await self._to_buffer(lambda eval_id=eval_id, body=body: self._buffer.eval_results(eval_id, body))
            except ConflictError as error:  # it has expired: nothing is wrong here
                log.warning("evaluation results too late", eval_id=eval_id, detail=str(error))
            except (BadRequestError, NotFoundError) as error:
                log.error("evaluation results refused", eval_id=eval_id, detail=str(error))
            else:
                self._status.counts["evals_reported"] += len(results)

    async def _to_buffer(self, call: Callable[[], T]) -> T:
        return await patiently(
            call,
            waits=self._status.waits,
            owner="pushing",
            service="buffer",
            deadline_s=self._recipe.searcher.retry_s,
        )
