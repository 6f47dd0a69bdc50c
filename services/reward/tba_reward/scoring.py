"""From a batch of completions to one result each.

    POST /v1/score --> Scorer.score --+-- fast rewards: here, in chunks, the event loop breathes between them
                                      `-- all others:  worker processes (pebble), one item each --> result or kill

Who waits for what: a request waits for its slowest item; an item waits for a free worker, then at most `item_timeout_s`
for its result, after which its worker is killed. When more than `max_pending` items wait, new ones are refused
("reward-workers", 429). Nothing here turns a failure into a number.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as PoolTimeoutError
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool

from tba.api import ScoreError, ScoreItem, ScoreResult
from tba.errors import BusyError
from tba.logs import get_logger
from tba_reward.metrics import Metrics
from tba_reward.registry import BadDataError, Registry, Reward, RewardFunction

log = get_logger("scoring")

CHUNK_ITEMS = 64
CHUNK_CHARS = 100_000
MAX_DETAIL_CHARS = 500


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no score."""

    reason: Literal["unknown_task", "bad_data", "timeout", "exception", "not_finite"]
    detail: str


class Scorer:
    """Scores completions and knows the health of every reward.

    Args:
        item_timeout_s: deadline of one item in a worker process.
        max_pending: most items in workers or waiting for one.
    """

    def __init__(
        self,
        registry: Registry,
        metrics: Metrics,
        *,
        num_workers: int,
        item_timeout_s: float,
        max_pending: int,
    ) -> None:
        self._registry, self._metrics = registry, metrics
        self._item_timeout_s, self._max_pending = item_timeout_s, max_pending
        self._num_pending = 0
        self._pool = ProcessPool(max_workers=num_workers, context=multiprocessing.get_context("spawn"))
        self.health: dict[str, str] = dict.fromkeys(registry.tasks, "its example is being scored")

    async def check(self) -> None:
        """Score every reward's example where it will run; `health` becomes "ok" or a sentence.

        A first import in a fresh worker may be slow, hence three attempts.
        """
        for reward in self._registry:
            for _ in range(3):
                self.health[reward.task] = await self._check_one(reward)
                if self.health[reward.task] == "ok":
                    break
            log.info("reward", task=reward.task, version=reward.version, health=self.health[reward.task])

    async def ready(self) -> str | None:
        """None, or what is wrong with which reward."""
        if any(not reward.fast for reward in self._registry) and not self._pool.active:
            return "the worker pool has stopped; restart the service"
        bad = [f"{task}: {health}" for task, health in sorted(self.health.items()) if health != "ok"]
        return "; ".join(bad) or None

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """One result per item, in order.

        Raises:
            BusyError: too many items wait for worker processes.
        """
        rewards = [self._registry.get(item.task) for item in items]
        slow = {n: reward for n, reward in enumerate(rewards) if reward is not None and not reward.fast}
        if slow and self._num_pending + len(slow) > max(self._max_pending, len(slow)):
            raise BusyError(
                f"{self._num_pending} completions wait for worker processes already; come back later, or raise "
                "reward.num_workers",
                retry_after_s=self._item_timeout_s,
                wait="reward-workers",
            )
        pooled = {n: asyncio.create_task(self._score_in_pool(items[n], reward)) for n, reward in slow.items()}
        self._pending(len(pooled))
        for task in pooled.values():
            task.add_done_callback(lambda _: self._pending(-1))
        try:
            results: list[ScoreResult | None] = [None] * len(items)
            num_items = num_chars = 0
            for n, (item, reward) in enumerate(zip(items, rewards, strict=True)):
                if n in pooled:
                    continue
                results[n] = self._score_here(item, reward)
                num_items, num_chars = num_items + 1, num_chars + len(item.response)
                if num_items >= CHUNK_ITEMS or num_chars >= CHUNK_CHARS:
                    num_items = num_chars = 0
                    await asyncio.sleep(0)
            for n, task in pooled.items():
                results[n] = await task
            return [result for result in results if result is not None]
        finally:
            for task in pooled.values():
                task.cancel()

    def close(self) -> None:
        """Stop the worker processes."""
        self._pool.stop()
        self._pool.join()

    def _score_here(self, item: ScoreItem, reward: Reward | None) -> ScoreResult:
        start_s = time.perf_counter()
        if reward is None:
            known = ", ".join(self._registry.tasks)
            outcome = Failure("unknown_task", f"no reward for task {item.task!r}; known: {known}")
        else:
            outcome = call(reward.function, item.prompt, item.response, item.data)
        return self._result(item, reward, outcome, start_s)

    async def _score_in_pool(self, item: ScoreItem, reward: Reward) -> ScoreResult:
        start_s = time.perf_counter()
        try:
            future = self._pool.schedule(
                call, args=(reward.function, item.prompt, item.response, item.data), timeout=self._item_timeout_s
            )
            outcome = await asyncio.wrap_future(future)
        except PoolTimeoutError:
            outcome = Failure("timeout", f"no result after {self._item_timeout_s:g} s; the worker was killed")
        except ProcessExpired as error:
            outcome = Failure("exception", f"the worker died with exit code {error.exitcode}")
        except Exception as error:  # the pool itself failed: still a reason, never a number
            log.error("pool_failed", exc_info=error)
            outcome = Failure("exception", f"the worker pool failed: {type(error).__name__}: {error}")
        return self._result(item, reward, outcome, start_s)

    def _result(self, item: ScoreItem, reward: Reward | None, outcome: float | Failure, start_s: float) -> ScoreResult:
        task = "unknown" if reward is None else reward.task  # a label per misspelt task would grow without bound
        elapsed_s = time.perf_counter() - start_s
        if reward is not None and not isinstance(outcome, Failure):
            self._metrics.count(task, "scored", elapsed_s)
            return ScoreResult(item_id=item.item_id, reward=outcome, reward_version=reward.version)
        assert isinstance(outcome, Failure)
        self._metrics.count(task, outcome.reason, elapsed_s)
        error = ScoreError(reason=outcome.reason, detail=outcome.detail[:MAX_DETAIL_CHARS])
        return ScoreResult(item_id=item.item_id, error=error)

    def _pending(self, change: int) -> None:
        self._num_pending += change
        self._metrics.pending.set(self._num_pending)

    async def _check_one(self, reward: Reward) -> str:
        example = reward.example
        item = ScoreItem(
            item_id="example",
            task=reward.task,
            prompt=example.prompt,
            response=example.response,
            data=dict(example.data),
        )
        result = (await self.score([item]))[0]
        if result.error is not None:
            return f"its example failed ({result.error.reason}: {result.error.detail})"
        if result.reward != example.reward:
            return f"its example scored {result.reward}, not {example.reward}"
        return "ok"


def call(function: RewardFunction, prompt: str, response: str, data: Mapping[str, Any]) -> float | Failure:
    """Call a reward function, here or in a worker process; whatever goes wrong is a Failure.

    Nothing of the function's own types leaves: an exception that cannot be pickled must not stop the pool.
    """
    try:
        value = function(prompt, response, data)
        if not isinstance(value, Real):
            return Failure("exception", f"the reward is {value!r:.100}, not a number")
        number = float(value)
    except BadDataError as error:
        return Failure("bad_data", str(error))
    except (Exception, SystemExit) as error:  # reward code may raise anything; it is reported, not swallowed
        return Failure("exception", f"{type(error).__name__}: {error}")
    return number if math.isfinite(number) else Failure("not_finite", f"the reward is {number}")
