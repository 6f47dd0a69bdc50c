"""One scorer as a part of a task's reward: started when it is needed, tried again when it does not start, measured.

Three ways not to be well, which /readyz tells apart (scoring.py):

    it does not start, or its process is gone    the service is not ready
    what it asks elsewhere is away               its task is not ready, the service is: others are scored meanwhile
    it raises, whatever it is asked              it is broken: waiting does not help, so the run is to stop
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tba.api.scores import ANSWER_REASONS, STARTING
from tba.config.reward import HttpSpec, ModelScorerSpec, ReadSpec, ScorerSpec
from tba.logs import get_logger
from tba_reward.cache import content_key
from tba_reward.metrics import Metrics
from tba_reward.scorers.base import Failure, Item, Outcome, Scorer, checked
from tba_reward.scorers.example import OK

RESTART_S = 10.0
"""Pause before a scorer that did not start is started again."""
BROKEN_ITEMS = 32
"""So many different items must have raised, and none been scored since the start, until a scorer counts as broken."""
IDLE = "idle"
log = get_logger("scorer")


class Part:
    """A scorer with its place in a reward.

    Args:
        task: whose reward.
        spec: its settings.
        scorer: what scores.
        is_inline: whether it runs in the service itself: it waits for nothing else, so it never counts as pending.
    """

    def __init__(self, task: str, spec: ScorerSpec, scorer: Scorer, metrics: Metrics, *, is_inline: bool) -> None:
        self.task, self.spec, self.is_inline = task, spec, is_inline
        self._scorer, self._metrics = scorer, metrics
        self._starting: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._problem = IDLE
        self._was_well = False
        self._raised: set[bytes] | None = set()
        """Different items that raised; None: one was scored, so that the scorer is not broken."""
        self._broken: str | None = None

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
        return self._problem or self._broken or self._scorer.health()

    @property
    def broken(self) -> str | None:
        """What it raises for every item, or None."""
        return self._broken

    @property
    def is_away(self) -> bool:
        """Whether what is wrong may pass and concerns no other task: an endpoint is away, or a process of models that
        was well is started again."""
        if self.health == OK or not self._tried.is_set() or self._broken is not None:
            return False
        return isinstance(self.spec, HttpSpec) or (self._was_well and isinstance(self.spec, ModelScorerSpec))

    def begin(self) -> None:
        """Start in the background; nothing where that was done before."""
        if self._starting is None:
            self._problem = STARTING
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
            self._watch(items, outcomes)
        self._metrics.asked(self.task, self.name, outcomes, time.perf_counter() - start_s)
        return [self._judged(outcome) for outcome in outcomes]

    def _judged(self, outcome: Outcome) -> Outcome:
        """The score of an answer that nothing can read: without it nonsense would cost a policy less than a mistake."""
        if not isinstance(self.spec, ReadSpec) or isinstance(self.spec.unreadable, str):
            return outcome
        is_answers_fault = isinstance(outcome, Failure) and outcome.reason in ANSWER_REASONS
        return self.spec.unreadable if is_answers_fault else outcome

    def _watch(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> None:
        """Notice that it raises whatever it is asked; the first item that it scores, or abstains from, ends that."""
        if self._raised is None or isinstance(self.spec, HttpSpec):
            return
        if any(not isinstance(outcome, Failure) or outcome.reason == "abstained" for outcome in outcomes):
            self._raised = self._broken = None
            return
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Failure) and outcome.reason == "exception" and len(self._raised) < BROKEN_ITEMS:
                self._raised.add(content_key("", item))
                if len(self._raised) == BROKEN_ITEMS:
                    self._broken = f"it raised for each of the first {BROKEN_ITEMS} different items: {outcome.detail}"
                    log.error("scorer_broken", task=self.task, scorer=self.name, detail=outcome.detail)

    async def _ask(self, items: Sequence[Item]) -> list[Outcome]:
        try:
            outcomes = await self._scorer.score(items)
        except Exception as error:  # a defect of a scorer costs its own items alone, and shows in the log
            log.exception("scorer_failed", task=self.task, scorer=self.name)
            return [Failure("exception", f"the scorer failed: {type(error).__name__}: {error}")] * len(items)
        if len(outcomes) != len(items):
            log.error("scorer_failed", task=self.task, scorer=self.name, num_items=len(items), num_scores=len(outcomes))
            return [Failure("exception", f"the scorer gave {len(outcomes)} scores for {len(items)} items")] * len(items)
        return [each if isinstance(each, Failure) else checked(each) for each in outcomes]

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
                self._was_well = True
                return
            await asyncio.sleep(RESTART_S)
