"""One scorer as a part of a task's reward: started when it is needed, tried again when it does not start, measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tba.config.reward import ScorerSpec
from tba.logs import get_logger
from tba_reward.metrics import Metrics
from tba_reward.scorers.base import Failure, Item, Outcome, Scorer
from tba_reward.scorers.example import OK

RESTART_S = 10.0
"""Pause before a scorer that did not start is started again."""
IDLE = "idle"
log = get_logger("scorer")


class Part:
    """A scorer with its place in a reward.

    Args:
        task: whose reward.
        spec: its settings.
        scorer: what scores.
        is_inline: whether it runs on the event loop: it waits for nothing, so it never counts as pending.
    """

    def __init__(self, task: str, spec: ScorerSpec, scorer: Scorer, metrics: Metrics, *, is_inline: bool) -> None:
        self.task, self.spec, self.is_inline = task, spec, is_inline
        self._scorer, self._metrics = scorer, metrics
        self._starting: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._problem = IDLE

    @property
    def name(self) -> str:
        """What this part is called in results."""
        return self.spec.part

    @property
    def version(self) -> str:
        """That of its scorer."""
        return self._scorer.version

    @property
    def health(self) -> str:
        """`ok`, `idle` before it is first needed, or what is wrong."""
        return self._problem or self._scorer.health()

    def begin(self) -> None:
        """Start in the background; nothing where that was done before."""
        if self._starting is None:
            self._problem = "it is starting"
            self._starting = asyncio.create_task(self._start(), name=f"start {self.task} {self.name}")

    async def started(self) -> None:
        """Wait for the end of its first attempt to start."""
        self.begin()
        await self._tried.wait()

    async def close(self) -> None:
        """Stop it."""
        if self._starting is None:
            return
        self._starting.cancel()
        await asyncio.wait([self._starting])
        await self._scorer.close()

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item, in order, whatever the scorer does."""
        if not items:
            return []
        start_s = time.perf_counter()
        await self.started()
        if self._problem:
            failure = Failure("unreachable", f"the scorer did not start: {self._problem}")
            outcomes: list[Outcome] = [failure] * len(items)
        else:
            outcomes = await self._ask(items)
        self._metrics.asked(self.task, self.name, outcomes, time.perf_counter() - start_s)
        return outcomes

    async def _ask(self, items: Sequence[Item]) -> list[Outcome]:
        try:
            outcomes = await self._scorer.score(items)
        except Exception as error:  # a defect of a scorer costs its own items alone, and shows in the log
            log.exception("scorer_failed", task=self.task, scorer=self.name)
            return [Failure("exception", f"the scorer failed: {type(error).__name__}: {error}")] * len(items)
        if len(outcomes) != len(items):
            log.error("scorer_failed", task=self.task, scorer=self.name, num_items=len(items), num_scores=len(outcomes))
            return [Failure("exception", f"the scorer gave {len(outcomes)} scores for {len(items)} items")] * len(items)
        return outcomes

    async def _start(self) -> None:
        while True:
            try:
                await self._scorer.start()
                self._problem = ""
            except Exception as error:  # whatever it is, the others go on, and this one is tried again
                self._problem = f"{type(error).__name__}: {error}"
            self._tried.set()
            log.info("scorer", task=self.task, scorer=self.name, health=self.health)
            if self.health == OK:
                return
            await asyncio.sleep(RESTART_S)
