"""From a batch of completions to one result each.

    POST /v1/score -> Scoring.score -> per task: Composition -> parts: inline, in workers, in model processes, over HTTP

Who waits for what: a request waits for its slowest item; every item has a deadline in each of its scorers; a request
that is not through after `request_timeout_s` is refused (503; parts of it that were done by then are in the cache).
When more than `max_pending_items` are in work, new ones are refused ("reward-workers", 429). Nothing here turns a
failure into a number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from tba.api import ScoreError, ScoreItem, ScoreResult
from tba.errors import BrokenRewardError, BusyError, UnavailableError
from tba_reward.composition import Composition, Scored
from tba_reward.metrics import Metrics
from tba_reward.scorers.base import Failure, Item, clean
from tba_reward.scorers.example import OK

UNKNOWN = "unknown"
"""Label of metrics: one per misspelt task would grow without bound."""


class Scoring:
    """Scores completions and knows the health of every task.

    Args:
        tasks: how each is scored.
        max_pending_items: most items in work at once that wait for something; one request may be larger.
        request_timeout_s: deadline of a request.
    """

    def __init__(
        self,
        tasks: Mapping[str, Composition],
        metrics: Metrics,
        *,
        max_pending_items: int,
        request_timeout_s: float,
    ) -> None:
        self.tasks = tasks
        self._metrics = metrics
        self._max_pending_items, self._request_timeout_s = max_pending_items, request_timeout_s
        self._num_pending = 0

    def begin(self) -> None:
        """Start every task that the service has to be ready for."""
        for task in self.tasks.values():
            if task.is_required:
                task.begin()

    async def close(self) -> None:
        """Stop all scorers."""
        await asyncio.gather(*(task.close() for task in self.tasks.values()))

    async def ready(self) -> str | None:
        """None, or what is wrong with which task. What is away elsewhere makes its own tasks not ready (`away`), not
        the service: the others are scored, and items of those are asked for later.

        Raises:
            BrokenRewardError: a scorer raises for every item, so that waiting does not help.
        """
        for name, task in self.tasks.items():
            if task.broken is not None:
                raise BrokenRewardError(f"task {name}: {task.broken}")
        bad = [
            f"{name}: {task.health}"
            for name, task in self.tasks.items()
            if task.is_required and task.health != OK and not task.is_away
        ]
        return "; ".join(bad) or None

    def away(self) -> str | None:
        """The tasks that are not ready because something elsewhere is away, and what."""
        return "; ".join(f"{name}: {task.health}" for name, task in self.tasks.items() if task.is_away) or None

    async def score(self, items: Sequence[ScoreItem | ScoreResult]) -> list[ScoreResult]:
        """One result per item, in order; what is a result already stays.

        Raises:
            BusyError: too many items are in work.
            UnavailableError: the request took longer than it may.
        """
        results: list[ScoreResult | None] = [None] * len(items)
        by_task: dict[str, list[int]] = {}
        for at, item in enumerate(items):
            if isinstance(item, ScoreResult):
                results[at] = item
            elif item.task in self.tasks:
                by_task.setdefault(item.task, []).append(at)
            else:
                detail = f"no reward for task {item.task!r}; known: {', '.join(self.tasks)}"
                results[at] = _failed(item.item_id, Failure("unknown_task", detail))
        refused = [result.error.reason for result in results if result is not None and result.error is not None]
        if refused:
            self._metrics.done(UNKNOWN, refused)
        num_waiting = sum(len(places) for task, places in by_task.items() if not self.tasks[task].is_inline)
        self._admit(num_waiting)
        self._pending(num_waiting)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                tasks = [self._score_task(task, [items[at] for at in places]) for task, places in by_task.items()]
                found = await asyncio.gather(*tasks)
        except TimeoutError:
            raise UnavailableError(
                f"{len(items)} items were not all scored within {self._request_timeout_s:g} s "
                "(reward.request_timeout_s); send smaller requests"
            ) from None
        finally:
            self._pending(-num_waiting)
        for places, scored in zip(by_task.values(), found, strict=True):
            for at, result in zip(places, scored, strict=True):
                results[at] = result
        return [result for result in results if result is not None]

    async def _score_task(self, name: str, items: Sequence[ScoreItem | ScoreResult]) -> list[ScoreResult]:
        task, start_s = self.tasks[name], time.perf_counter()
        chosen = [item for item in items if isinstance(item, ScoreItem)]
        found = await task.score(
            [
                Item(
                    prompt=item.prompt,
                    response=item.response,
                    data=item.data,
                    finish_reason=item.finish_reason,
                    response_tokens=item.response_tokens,
                )
                for item in chosen
            ]
        )
        version = task.version
        results = [_result(item.item_id, scored, version) for item, scored in zip(chosen, found, strict=True)]
        labels = ["scored" if result.error is None else result.error.reason for result in results]
        self._metrics.done(name, labels, time.perf_counter() - start_s)
        return results

    def _admit(self, num_items: int) -> None:
        if num_items and self._num_pending + num_items > max(self._max_pending_items, num_items):
            raise BusyError(
                f"{self._num_pending} completions are being scored already; come back later, or raise "
                "reward.num_workers or reward.max_pending_items",
                retry_after_s=1.0,
                wait="reward-workers",
            )

    def _pending(self, change: int) -> None:
        self._num_pending += change
        self._metrics.pending.set(self._num_pending)


def _result(item_id: str, scored: Scored, version: str) -> ScoreResult:
    assert scored.outcome is not None
    if isinstance(scored.outcome, Failure):
        return _failed(item_id, scored.outcome)
    return ScoreResult(item_id=item_id, reward=scored.outcome, reward_version=version, parts=scored.parts)


def _failed(item_id: str, failure: Failure) -> ScoreResult:
    error = ScoreError(reason=failure.reason, detail=clean(failure.detail))
    return ScoreResult(item_id=item_id, error=error)
