"""The tasks that the service scores, and how each completion of a request gets its result.

    POST /v1/score -> RewardService.score -> per task: CompositeReward -> components: inline, in worker processes,
                                                                          in model processes, over HTTP

A request waits for its slowest item. Every item has a deadline in each of its scorers. A request that takes longer than
`request_timeout_s` is refused (503); the scores known by then stay in the cache. When more than `max_pending` items are
in work, new requests are refused ("reward-workers", 429). A failure never becomes a number here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from tba.api import ScoreError, ScoreItem, ScoreResult
from tba.config.reward import ExactSpec, LastNumberSpec, MathSpec, RewardSection, TaskReward
from tba.errors import BrokenRewardError, BusyError, ConfigError, UnavailableError
from tba.logs import get_logger
from tba_reward.composite_reward import CompositeReward, RewardComponent, ScoreCache
from tba_reward.metrics import Metrics
from tba_reward.scorer import OK, Failure, Item, clean
from tba_reward.scorers import Tools, build_scorer

BUILT_IN: Mapping[str, TaskReward] = {
    "addition": TaskReward(scorers=[ExactSpec(kind="exact")]),
    "exact": TaskReward(scorers=[ExactSpec(kind="exact")]),
    "gsm8k": TaskReward(scorers=[LastNumberSpec(kind="last_number")]),
    "math": TaskReward(scorers=[MathSpec(kind="math")]),
}
"""Tasks that need no entry in a recipe. A built-in task that needs worker processes starts with its first item."""
UNKNOWN = "unknown"
"""Metric label of unreadable items and unknown tasks: one label per misspelt task would grow without bound."""
log = get_logger("tasks")


def build_tasks(
    section: RewardSection, tools: Tools, cache: ScoreCache, metrics: Metrics
) -> dict[str, CompositeReward]:
    """Return all tasks by name, not started. A built-in task whose package is not installed is left out."""
    tasks: dict[str, CompositeReward] = {}
    for task, config in sorted({**BUILT_IN, **section.tasks}.items()):
        is_asked_for = task in section.tasks
        try:
            components = [
                RewardComponent(task, name, spec, build_scorer(spec, tools), metrics, cache=cache)
                for name, spec in config.parts.items()
            ]
        except ConfigError as error:
            if is_asked_for:
                raise ConfigError(f"reward.tasks.{task}: {error}") from None
            # a package is not installed
            log.info("built-in task left out", task=task, detail=str(error))
            continue
        is_required = is_asked_for or all(each.is_inline for each in components)
        tasks[task] = CompositeReward(task, components, is_required=is_required)
    return tasks


class RewardService:
    """Scores completions, and reports the health of every task.

    Args:
        max_pending: most items in work at once, inline ones not counted; a single request may have more.
        request_timeout_s: deadline of a request.
    """

    def __init__(
        self, tasks: Mapping[str, CompositeReward], metrics: Metrics, *, max_pending: int, request_timeout_s: float
    ) -> None:
        self.tasks = tasks
        self._metrics = metrics
        self._max_pending, self._request_timeout_s = max_pending, request_timeout_s
        self._num_pending = 0

    def start(self) -> None:
        """Start every task that the service has to be ready for, in the background."""
        for task in self.tasks.values():
            if task.is_required:
                task.start()

    async def close(self) -> None:
        """Stop all scorers."""
        await asyncio.gather(*(task.close() for task in self.tasks.values()))

    async def ready(self) -> str | None:
        """Return None, or the problem of each task that keeps the service from being ready.

        Raises:
            BrokenRewardError: a scorer raises for every item, so that waiting does not help.
        """
        for name, task in self.tasks.items():
            if task.broken is not None:
                raise BrokenRewardError(f"task {name}: {task.broken}")
        # an endpoint that is away makes its own tasks not ready (`away`), not the service: the others are scored, and
        # items of these are asked for later
        bad = [
            f"{name}: {task.health}"
            for name, task in self.tasks.items()
            if task.is_required and task.health != OK and not task.is_away
        ]
        return "; ".join(bad) or None

    def away(self) -> str | None:
        """Return the tasks that are away (`CompositeReward.is_away`) with their problems, or None if there are none."""
        return "; ".join(f"{name}: {task.health}" for name, task in self.tasks.items() if task.is_away) or None

    async def score(self, items: Sequence[ScoreItem | ScoreResult]) -> list[ScoreResult]:
        """Return one result per item, in order; an item that is a ScoreResult already (an error) is returned as it is.

        Raises:
            BusyError: too many items are in work.
            UnavailableError: the request took longer than `request_timeout_s`.
        """
        results, by_task = dict[int, ScoreResult](), dict[str, dict[int, ScoreItem]]()
        for at, item in enumerate(items):
            if isinstance(item, ScoreResult):
                results[at] = item
            elif item.task in self.tasks:
                # a request may mix tasks: each one scores its own items, all tasks at once
                by_task.setdefault(item.task, {})[at] = item
            else:
                detail = f"no reward for task {item.task!r}; known: {', '.join(self.tasks)}"
                results[at] = failed(item.item_id, Failure("unknown_task", detail))
        if results:
            self._metrics.record_results(UNKNOWN, [_label(result) for result in results.values()])
        # items that are scored inline wait for nothing, so that they are never refused
        num_waiting = sum(len(chosen) for task, chosen in by_task.items() if not self.tasks[task].is_inline)
        # one request may be larger than the limit, or it could never be scored
        if num_waiting and self._num_pending + num_waiting > max(self._max_pending, num_waiting):
            raise BusyError(
                f"{self._num_pending} completions are already being scored; try again later, or raise "
                "reward.num_workers",
                retry_after_s=1.0,
                wait="reward-workers",
            )
        self._add_pending(num_waiting)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                found = await asyncio.gather(*(self._score_task(task, chosen) for task, chosen in by_task.items()))
        except TimeoutError:
            raise UnavailableError(
                f"{len(items)} items were not all scored within {self._request_timeout_s:g} s; send smaller requests"
            ) from None
        finally:
            self._add_pending(-num_waiting)
        for each in found:
            results |= each
        return [results[at] for at in range(len(items))]

    async def _score_task(self, name: str, items: Mapping[int, ScoreItem]) -> dict[int, ScoreResult]:
        """Score the items of one task, and return their results by index in the request."""
        task, start_s = self.tasks[name], time.perf_counter()
        rewards = await task.score(
            [
                Item(
                    prompt=item.prompt,
                    response=item.response,
                    data=item.data,
                    finish_reason=item.finish_reason,
                    response_tokens=item.response_tokens,
                )
                for item in items.values()
            ]
        )
        # after scoring: the version of a model or an endpoint is known once it has answered
        version = task.version
        pairs = zip(items.items(), rewards, strict=True)
        results = dict[int, ScoreResult]()
        for (at, item), reward in pairs:
            outcome = reward.outcome
            assert outcome is not None
            if isinstance(outcome, Failure):
                results[at] = failed(item.item_id, outcome)
                continue
            item_id, parts = item.item_id, reward.parts
            results[at] = ScoreResult(item_id=item_id, reward=outcome, reward_version=version, parts=parts)
        self._metrics.record_results(name, [_label(each) for each in results.values()], time.perf_counter() - start_s)
        return results

    def _add_pending(self, change: int) -> None:
        self._num_pending += change
        self._metrics.pending.set(self._num_pending)


def _label(result: ScoreResult) -> str:
    return "scored" if result.error is None else result.error.reason


def failed(item_id: str, failure: Failure) -> ScoreResult:
    """Return the result of an item that has no score."""
    error = ScoreError(reason=failure.reason, detail=clean(failure.detail))
    return ScoreResult(item_id=item_id, error=error)
