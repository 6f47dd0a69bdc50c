"""The reward of a task: a cache of known scores, the task's scorers as components, and their weighted sum with gates.

    gates, one after the other:  a score below its gate: the reward is 0, and no other component scores the item
    all others at once:          the reward is the sum of weight times score, gates with a weight included
    a component has a Failure:   the reward is a Failure with the same reason

A component can have three kinds of problem, which /readyz tells apart (service.py):

    it did not start, or its workers are gone       the service is not ready
    away: an endpoint fails, or a model process     its task is not ready; the service is, and scores the other tasks
          that has worked before is started again
    broken: it raises for every item                waiting does not help, so the run has to stop
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tba.api.scores import ANSWER_REASONS, STARTING
from tba.config.reward import HttpSpec, ModelScorerSpec, ReadSpec, ScorerSpec
from tba.logs import get_logger
from tba_reward.metrics import Metrics
from tba_reward.scorer import OK, Failure, InlineScorer, Item, Outcome, Scorer, checked

CHUNK_ITEMS = 64
"""Most items of one call of a cached scorer. Each call's scores are cached, even if the request fails later."""
RESTART_S = 10.0
"""Pause before the next attempt to start a scorer that failed to start."""
BROKEN_ITEMS = 32
"""A scorer is broken when it has raised for this many different items and has scored none."""
IDLE = "idle"
VERSION_HEX = 12
log = get_logger("scorer")


class ScoreCache:
    """A cache of scores for all scorers, by scorer version and item content; evicts the least recently used.

    Failures are never cached, because a later attempt may succeed.
    """

    def __init__(self, max_items: int, metrics: Metrics) -> None:
        self._max_items, self._metrics = max_items, metrics
        self._scores: OrderedDict[bytes, float] = OrderedDict()

    async def score(self, scorer: Scorer, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order. Only items without a cached score are scored, equal ones once."""
        version = scorer.version
        keys = [content_key(version, item) for item in items]
        found, asked = dict[bytes, Outcome](), dict[bytes, Item]()
        for key, item in zip(keys, items, strict=True):
            if key in self._scores:
                self._scores.move_to_end(key)
                found[key] = self._scores[key]
            else:
                asked[key] = item
        self._metrics.cache_hits.inc(len(items) - len(asked))
        unknown = list(asked.items())
        # the scorer still gets all chunks at once; only what is kept comes in pieces
        chunks = [unknown[at : at + CHUNK_ITEMS] for at in range(0, len(unknown), CHUNK_ITEMS)]
        for scored in await asyncio.gather(*(self._ask(scorer, chunk) for chunk in chunks)):
            found |= scored
        return [found[key] for key in keys]

    async def _ask(self, scorer: Scorer, chunk: Sequence[tuple[bytes, Item]]) -> dict[bytes, Outcome]:
        """Score (key, item) pairs, cache the scores, and return all outcomes by key."""
        outcomes = await scorer.score([item for _, item in chunk])
        found = {key: outcome for (key, _), outcome in zip(chunk, outcomes, strict=True)}
        # at once, not when the whole request is done: it may be cancelled before
        for key, outcome in found.items():
            if not isinstance(outcome, Failure):
                self._scores[key] = outcome
                self._scores.move_to_end(key)
        while len(self._scores) > self._max_items:
            self._scores.popitem(last=False)
        return found


def content_key(version: str, item: Item) -> bytes:
    """Return a digest of the scorer's version and of all fields of the item that its score may depend on."""
    tokens = "" if item.response_tokens is None else json.dumps(list(item.response_tokens))
    data = json.dumps(dict(item.data), sort_keys=True)
    parts = (version, item.prompt, item.response, item.finish_reason, data, tokens)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = part.encode("utf-8", "surrogatepass")
        # with its length: "a", "bc" and "ab", "c" are different contents
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.digest()


class RewardComponent:
    """One scorer of a task, with its weight, gate and health.

    Args:
        cache: the scores of earlier items; None, or an inline scorer: every item is scored anew.
    """

    def __init__(
        self,
        task: str,
        name: str,
        spec: ScorerSpec,
        scorer: Scorer,
        metrics: Metrics,
        *,
        cache: ScoreCache | None = None,
    ) -> None:
        self.task, self.name, self.spec, self.weight = task, name, spec, spec.factor
        self.is_inline = isinstance(scorer, InlineScorer)
        """Whether the scorer runs in the service's own process. Its items never wait, and do not count as pending."""
        self._scorer, self._metrics = scorer, metrics
        self._cache = None if self.is_inline else cache  # looking a score up costs as much as scoring inline
        self._starting: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._problem = IDLE
        self._was_well = False
        self._raised: set[bytes] | None = set()
        """Digests of the items for which the scorer raised; None once it has scored, or abstained from, any item."""
        self.broken: str | None = None
        """The error that the scorer raises for every item; None if it is not broken."""

    @property
    def version(self) -> str:
        """The scorer's version (`Scorer.version`)."""
        return self._scorer.version

    @property
    def health(self) -> str:
        """`ok`, `idle` if it was never started, or a sentence that says what is wrong."""
        return self._problem or self.broken or self._scorer.health()

    @property
    def is_away(self) -> bool:
        """Whether waiting may help: an endpoint fails, or a model process that has worked before is being restarted."""
        if self.health == OK or not self._tried.is_set() or self.broken is not None:
            return False
        # an endpoint is away, or a process of models that was well is started again
        return isinstance(self.spec, HttpSpec) or (self._was_well and isinstance(self.spec, ModelScorerSpec))

    def start(self) -> None:
        """Start the scorer in the background, with another attempt every RESTART_S; do nothing if called before."""
        if self._starting is None:
            self._problem = STARTING
            self._starting = asyncio.create_task(self._start(), name=f"start {self.task} {self.name}")

    async def wait_started(self) -> None:
        """Start the scorer, and wait until the first attempt has succeeded or failed."""
        self.start()
        await self._tried.wait()

    async def close(self) -> None:
        """Stop the scorer, or cancel its start."""
        if self._starting is None:
            return
        # its start may be under way, or be waiting for the next attempt
        self._starting.cancel()
        await asyncio.wait([self._starting])
        await self._scorer.close()

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order. A response that cannot be graded gets the recipe's `unreadable`."""
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
        if not isinstance(self.spec, ReadSpec) or isinstance(self.spec.unreadable, str):
            return outcomes
        # without the recipe's score nonsense, which has none, would cost a policy less than a mistake, which scores 0
        return [
            self.spec.unreadable if isinstance(each, Failure) and each.reason in ANSWER_REASONS else each
            for each in outcomes
        ]

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
            cache, scorer = self._cache, self._scorer
            outcomes = await (scorer.score(items) if cache is None else cache.score(scorer, items))
        except Exception as error:  # a defect of a scorer costs its own items alone, and shows in the log
            log.exception("scorer_failed", task=self.task, scorer=self.name)
            return [Failure("exception", f"the scorer failed: {type(error).__name__}: {error}")] * len(items)
        if len(outcomes) != len(items):
            detail = f"the scorer returned {len(outcomes)} scores for {len(items)} items"
            log.error("scorer_failed", task=self.task, scorer=self.name, detail=detail)
            return [Failure("exception", detail)] * len(items)
        return [each if isinstance(each, Failure) else checked(each) for each in outcomes]

    def _watch(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> None:
        """Set `broken` once the scorer has raised for BROKEN_ITEMS different items and has scored none."""
        # only a scorer that runs here can be broken: an endpoint that fails is away
        if self._raised is None or isinstance(self.spec, HttpSpec):
            return
        # one item that it scores, or abstains from, shows that it works
        if any(not isinstance(outcome, Failure) or outcome.reason == "abstained" for outcome in outcomes):
            self._raised = self.broken = None
            return
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Failure) and outcome.reason == "exception" and len(self._raised) < BROKEN_ITEMS:
                # by content: one bad item that is asked for again and again does not break a scorer
                self._raised.add(content_key("", item))
                if len(self._raised) == BROKEN_ITEMS:
                    self.broken = f"it raised for each of the first {BROKEN_ITEMS} different items: {outcome.detail}"
                    log.error("scorer_broken", task=self.task, scorer=self.name, detail=outcome.detail)


@dataclass(slots=True)
class ItemReward:
    """The scores of one item by component name, and its reward or Failure; None while neither is known."""

    parts: dict[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None


class CompositeReward:
    """The reward of one task.

    Args:
        is_required: whether the service starts this task and waits for it to be ready; else the first item starts it.
    """

    def __init__(self, task: str, components: Sequence[RewardComponent], *, is_required: bool) -> None:
        self.task, self.components, self.is_required = task, list(components), is_required
        self._gates = [each for each in components if each.spec.gate is not None]
        self._others = [each for each in components if each.spec.gate is None]

    @property
    def is_inline(self) -> bool:
        """Whether all scorers of the task run in the service's own process."""
        return all(each.is_inline for each in self.components)

    @property
    def version(self) -> str:
        """`task@digest`: changes whenever the same completion may be worth another reward."""
        scorers = [[each.version, each.name, each.weight, each.spec.gate] for each in self.components]
        # weights and gates too: the same scores under other weights are another reward
        document = json.dumps(scorers)
        return f"{self.task}@{hashlib.sha256(document.encode()).hexdigest()[:VERSION_HEX]}"

    @property
    def health(self) -> str:
        """`ok`, `idle`, or the problem of each component."""
        bad = {each.name: each.health for each in self.components if each.health != OK}
        if not bad:
            return OK
        if set(bad.values()) == {IDLE}:
            return IDLE
        return "; ".join(f"{name}: {health}" for name, health in bad.items())

    @property
    def is_away(self) -> bool:
        """Whether the task has a problem for which waiting may help: each component with a problem is away."""
        return self.health not in (OK, IDLE) and all(each.health == OK or each.is_away for each in self.components)

    @property
    def broken(self) -> str | None:
        """`NAME: ERROR` of the first component that raises for every item; None if there is none."""
        return next((f"{each.name}: {each.broken}" for each in self.components if each.broken is not None), None)

    def start(self) -> None:
        """Start all components in the background."""
        for each in self.components:
            each.start()

    async def close(self) -> None:
        """Stop all components."""
        await asyncio.gather(*(each.close() for each in self.components))

    async def score(self, items: Sequence[Item]) -> list[ItemReward]:
        """Return one reward per item, in order; its outcome is never None."""
        rewards = [ItemReward() for _ in items]
        # one after the other: an item below a gate is asked of no other component
        for gate in self._gates:
            places = _undecided(rewards)
            for at, outcome in zip(places, await gate.score([items[at] for at in places]), strict=True):
                self._note(rewards[at], gate, outcome)
        places = _undecided(rewards)
        chosen = [items[at] for at in places]
        scores = await asyncio.gather(*(each.score(chosen) for each in self._others))
        for component, outcomes in zip(self._others, scores, strict=True):
            for at, outcome in zip(places, outcomes, strict=True):
                self._note(rewards[at], component, outcome)
        for each in rewards:
            if each.outcome is not None:
                continue
            # fsum: the sum must not depend on the order of the scorers
            each.outcome = checked(math.fsum(one.weight * each.parts[one.name] for one in self.components))
            if isinstance(each.outcome, Failure):
                each.outcome = Failure(each.outcome.reason, f"the weighted sum: {each.outcome.detail}")
        return rewards

    def _note(self, reward: ItemReward, component: RewardComponent, outcome: Outcome) -> None:
        if not isinstance(outcome, Failure):
            reward.parts[component.name] = outcome
            if component.spec.gate is not None and outcome < component.spec.gate:
                reward.outcome = 0.0
        elif reward.outcome is None:
            # a single component needs no name
            detail = outcome.detail if len(self.components) == 1 else f"{component.name}: {outcome.detail}"
            reward.outcome = Failure(outcome.reason, detail)


def _undecided(rewards: Sequence[ItemReward]) -> list[int]:
    return [at for at, reward in enumerate(rewards) if reward.outcome is None]
