"""One scorer as a component of a task's reward: it is started, started again where that fails, and measured.

A component can be unwell in three ways, which /readyz tells apart (service.py):

    it does not start, or its process is gone    the service is not ready
    something that it asks elsewhere is away     its task is not ready, the service is: others are scored meanwhile
    it raises for every item                     it is broken: waiting does not help, so the run has to stop
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tba.api.scores import ANSWER_REASONS, STARTING
from tba.config.reward import HttpSpec, ModelScorerSpec, ReadSpec, ScorerSpec
from tba.logs import get_logger
from tba_reward.metrics import Metrics
from tba_reward.scorer import OK, Failure, Item, Outcome, Scorer, checked
from tba_reward.tasks.cache import content_key

RESTART_S = 10.0
"""Pause before a scorer that did not start is started again."""
BROKEN_ITEMS = 32
"""A scorer that raises for so many different items, and has scored none since the start, is broken."""
IDLE = "idle"
log = get_logger("scorer")


class RewardComponent:
    """A scorer with its place in a reward.

    Args:
        task: the task of the reward.
        spec: the settings of the scorer.
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
        """Its name in results."""
        return self.spec.part

    @property
    def version(self) -> str:
        """The version of its scorer."""
        return self._scorer.version

    @property
    def health(self) -> str:
        """`ok`, `idle` before it is first needed, or a sentence that says what is wrong."""
        return self._problem or self._broken or self._scorer.health()

    @property
    def broken(self) -> str | None:
        """The error that it raises for every item, or None."""
        return self._broken

    @property
    def is_away(self) -> bool:
        """Whether the problem may pass and concerns no other task."""
        if self.health == OK or not self._tried.is_set() or self._broken is not None:
            return False
        # an endpoint is away, or a process of models that was well is started again
        return isinstance(self.spec, HttpSpec) or (self._was_well and isinstance(self.spec, ModelScorerSpec))

    def start(self) -> None:
        """Start in the background; do nothing where that was done before."""
        if self._starting is None:
            self._problem = STARTING
            self._starting = asyncio.create_task(self._start(), name=f"start {self.task} {self.name}")

    async def wait_started(self) -> None:
        """Start, and wait for the end of the first attempt."""
        self.start()
        await self._tried.wait()

    async def close(self) -> None:
        """Stop it."""
        if self._starting is None:
            return
        self._starting.cancel()
        await asyncio.wait([self._starting])
        await self._scorer.close()

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order, whatever the scorer does."""
        if not items:
            return []
        start_s = time.perf_counter()
        await self.wait_started()
        if self._problem:
            failure = Failure("unreachable", f"the scorer did not start: {self._problem}")
            outcomes: list[Outcome] = [failure] * len(items)
        else:
            outcomes = await self._ask(items)
            self._watch(items, outcomes)
        self._metrics.record_outcomes(self.task, self.name, outcomes, time.perf_counter() - start_s)
        return [self._with_unreadable_score(outcome) for outcome in outcomes]

    async def _start(self) -> None:
        while True:
            try:
                await self._scorer.start()
                self._problem = ""
            except Exception as error:  # the other scorers continue, and this one is tried again
                self._problem = f"{type(error).__name__}: {error}"
            self._tried.set()
            log.info("scorer", task=self.task, scorer=self.name, health=self.health)
            if self.health == OK:
                self._was_well = True
                return
            await asyncio.sleep(RESTART_S)

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

    def _watch(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> None:
        """Notice that the scorer raises for every item."""
        # only a scorer that runs here can be broken: an endpoint that fails is away
        if self._raised is None or isinstance(self.spec, HttpSpec):
            return
        # one item that it scores, or abstains from, shows that it works
        if any(not isinstance(outcome, Failure) or outcome.reason == "abstained" for outcome in outcomes):
            self._raised = self._broken = None
            return
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Failure) and outcome.reason == "exception" and len(self._raised) < BROKEN_ITEMS:
                # by content: one bad item that is asked for again and again does not break a scorer
                self._raised.add(content_key("", item))
                if len(self._raised) == BROKEN_ITEMS:
                    self._broken = f"it raised for each of the first {BROKEN_ITEMS} different items: {outcome.detail}"
                    log.error("scorer_broken", task=self.task, scorer=self.name, detail=outcome.detail)

    def _with_unreadable_score(self, outcome: Outcome) -> Outcome:
        """Return the recipe's `unreadable` score where the answer is to blame that there is none."""
        if not isinstance(self.spec, ReadSpec) or isinstance(self.spec.unreadable, str):
            return outcome
        # without it nonsense, which has no score, would cost a policy less than a mistake, which scores 0
        is_answers_fault = isinstance(outcome, Failure) and outcome.reason in ANSWER_REASONS
        return self.spec.unreadable if is_answers_fault else outcome
