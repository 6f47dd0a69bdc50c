"""The reward of a task: a cache of known scores, the task's scorers as components, and their weighted sum with gates.

    gates, in their order:  a score below its gate -> 0; no other component is asked for the item
    all others at once:     sum of weight times score, gates with a weight included
    a score that was asked for is unknown:  the reward is unknown, for the same reason

A component can be unwell in three ways, which /readyz tells apart (service.py):

    it does not start, or its process is gone    the service is not ready
    something that it asks elsewhere is away     its task is not ready, the service is: others are scored meanwhile
    it raises for every item                     it is broken: waiting does not help, so the run has to stop
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
"""Items that a scorer is asked for at once. Scores are kept chunk by chunk, also where the request ends before."""
RESTART_S = 10.0
"""Pause before a scorer that did not start is started again."""
BROKEN_ITEMS = 32
"""A scorer that raises for so many different items, and has scored none since the start, is broken."""
IDLE = "idle"
VERSION_HEX = 12
log = get_logger("scorer")


class ScoreCache:
    """Scores by content, of all scorers together; the least recently used one is evicted first.

    Failures are never kept: asked again, they may be scored.
    """

    def __init__(self, max_items: int, metrics: Metrics) -> None:
        self._max_items, self._metrics = max_items, metrics
        self._scores: OrderedDict[bytes, float] = OrderedDict()

    async def score(self, scorer: Scorer, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order; ask the scorer once for each content whose score is not known."""
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
        """Return outcomes by key, and keep the scores among them."""
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
    """Return a digest of everything that a score may depend on."""
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
    """A scorer with its place in a reward.

    Args:
        cache: of known scores; None where the scorer is always asked.
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
        """Whether it runs in the service itself: it waits for nothing else, so it never counts as pending."""
        self._scorer, self._metrics = scorer, metrics
        self._cache = None if self.is_inline else cache  # looking a score up costs as much as scoring inline
        self._starting: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._problem = IDLE
        self._was_well = False
        self._raised: set[bytes] | None = set()
        """Different items that raised; None: one was scored, so that the scorer is not broken."""
        self.broken: str | None = None
        """The error that it raises for every item."""

    @property
    def version(self) -> str:
        """The version of its scorer."""
        return self._scorer.version

    @property
    def health(self) -> str:
        """`ok`, `idle` before it is first needed, or a sentence that says what is wrong."""
        return self._problem or self.broken or self._scorer.health()

    @property
    def is_away(self) -> bool:
        """Whether the problem may pass and concerns no other task."""
        if self.health == OK or not self._tried.is_set() or self.broken is not None:
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
        # its start may be under way, or be waiting for the next attempt
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
        """Notice that the scorer raises for every item."""
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
    """The known scores of one item by component, and in the end the reward or why there is none."""

    parts: dict[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None


class CompositeReward:
    """The reward of one task.

    Args:
        is_required: whether the service is ready only when this is healthy; otherwise the first item starts it.
    """

    def __init__(self, task: str, components: Sequence[RewardComponent], *, is_required: bool) -> None:
        self.task, self.components, self.is_required = task, list(components), is_required
        self._gates = [each for each in components if each.spec.gate is not None]
        self._others = [each for each in components if each.spec.gate is None]

    @property
    def is_inline(self) -> bool:
        """Whether its items wait for nothing."""
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
        """Whether the only problem is that something elsewhere is away."""
        return self.health not in (OK, IDLE) and all(each.health == OK or each.is_away for each in self.components)

    @property
    def broken(self) -> str | None:
        """The component that raises for every item, with its error; or None."""
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
