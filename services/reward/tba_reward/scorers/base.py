"""What a scorer is: items in, one score or one reason per item out.

A kind of scorer is one file, `tba_reward/scorers/KIND.py`, with a spec in tba/config/reward.py and

    def build(spec: KindSpec, tools: Tools) -> Scorer: ...

`build` raises ConfigError for what can be known to be wrong without running foreign code (a package that is not
installed, a folder that is not there) and starts nothing; `Scorer.start` does. Ready-made ways to run:

    InlineScorer  (inline.py)          a rule in a thread of the service: the length of the text must bound its time
    WorkerScorer  (workers/scorer.py)  a rule in worker processes that are killed at the deadline

A failed score is unknown, never a number.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from tba.api.scores import ScoreReason
from tba.config.reward import ScorerSpec
from tba.errors import TbaError
from tba.numbers import MAX_NUMBER, is_bounded

if TYPE_CHECKING:
    from tba_reward.models.process import ModelPool
    from tba_reward.workers.pool import WorkerPool

MAX_DETAIL_CHARS = 500
COMPOSITION_FIELDS = {"name", "weight", "gate", "timeout_s", "cache", "batch_items"}
"""Fields of a spec that say how its score is used, not what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One completion to score."""

    prompt: str
    response: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the prompt carries for its reward."""
    finish_reason: str = "stop"
    """`stop`, `stop_string`, `length` or `abort`."""
    response_tokens: Sequence[int] | None = None
    """The response as token ids, where the client has sent them."""

    @property
    def is_finished(self) -> bool:
        """Whether the response ended by itself, and was not cut off."""
        return self.finish_reason not in ("length", "abort")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no score."""

    reason: ScoreReason
    detail: str


Outcome = float | Failure
"""A bounded score, or why there is none."""


@dataclass(frozen=True, slots=True)
class Example:
    """An item with a known score that is not 0, scored at start to see whether the scorer works here."""

    item: Item
    score: float


class NoScoreError(TbaError, ValueError):
    """A rule has no score for an item; `reason` says of which kind."""

    slug = "no-score"
    status = 422
    reason: ScoreReason = "exception"


class BadDataError(NoScoreError):
    """The prompt's data is not what the rule needs."""

    slug = "bad-data"
    reason: ScoreReason = "bad_data"


class AmbiguousError(NoScoreError):
    """The response can be read in more than one way, so that it is neither right nor wrong."""

    slug = "ambiguous"
    reason: ScoreReason = "ambiguous"


Params = Mapping[str, Any]
"""What a rule is told once, made of what JSON can say."""
Rule = Callable[[Item, Params], float]
"""(item, params) -> score; raises NoScoreError for "no score"; stateless, at the top level of its module."""
BatchRule = Callable[[Sequence[Item], Params], list[Outcome]]
"""(items, params) -> an outcome each, in order; raises nothing but MemoryError because of an item."""


def gold_answers(item: Item, field: str) -> Sequence[object]:
    """The gold answers of an item: the members of a list (each of them is right), or the one that there is.

    Raises:
        BadDataError: the data has none.
    """
    value = item.data.get(field)
    golds = value if isinstance(value, list) else [value]
    if not golds:
        raise BadDataError(f"data needs a gold answer in `{field}`, got an empty list")
    return golds


def score_any(golds: Sequence[object], rule: Callable[[object], bool]) -> float:
    """1.0 if an answer is one of the gold answers by a rule, else 0.0.

    Raises:
        BadDataError: it is none of them, and one of them is not what the rule needs.
    """
    bad: BadDataError | None = None
    for gold in golds:
        try:
            if rule(gold):
                return 1.0
        except BadDataError as error:
            bad = bad or error
    if bad is not None:
        raise bad
    return 0.0


class Scorer(Protocol):
    """Scores items in order; shared by all requests."""

    @property
    def version(self) -> str:
        """Changes whenever the same input may give another number (`version_of`); final once `start` has returned."""
        ...

    async def start(self) -> None:
        """Load what is needed; tried again later when it raises or when `health` is not "ok" after it."""
        ...

    async def close(self) -> None:
        """Stop everything that was started; running `score` calls end with failures."""
        ...

    def health(self) -> str:
        """`ok`, or a sentence that says what is wrong."""
        ...

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item, in order. Never raises because of an item; every item has its deadline inside.

        Cancelled: gives up what it holds for these items.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What scorers are built with.

    Attributes:
        pool: the worker processes, shared by all WorkerScorers.
        models: the model processes, one per distinct set of models.
        item_timeout_s: the deadline of an item whose spec has none.
    """

    pool: WorkerPool
    models: ModelPool
    item_timeout_s: float

    def timeout_s(self, spec: ScorerSpec) -> float:
        """The deadline of one item of a scorer."""
        return self.item_timeout_s if spec.timeout_s is None else spec.timeout_s


def params_of(spec: ScorerSpec) -> dict[str, Any]:
    """The fields of a spec that decide what its scores are, as JSON has them."""
    return spec.model_dump(mode="json", exclude=COMPOSITION_FIELDS)


def version_of(spec: ScorerSpec, implementation: int, *digests: str) -> str:
    """Hexadecimal digest of everything that decides what a score is.

    Args:
        spec: the scorer's settings.
        implementation: raised whenever the code may give another number for the same input.
        digests: of whatever else decides, for example model files, the version of a package.
    """
    document = json.dumps([params_of(spec), implementation, *digests], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def outcome_of(rule: Rule, item: Item, params: Params) -> Outcome:
    """Apply a rule; whatever goes wrong is a Failure.

    Rules may be foreign code and raise anything: it is reported, not swallowed.
    """
    try:
        return checked(rule(item, params))
    except (Exception, SystemExit) as error:
        return failure_of(error)


def failure_of(error: BaseException) -> Failure:
    """What a rule raised, as the reason why there is no score."""
    if isinstance(error, NoScoreError):
        return Failure(error.reason, str(error))
    if isinstance(error, MemoryError):
        return Failure("out_of_memory", f"MemoryError: {error}")
    return Failure("exception", f"{type(error).__name__}: {error}")


def checked(value: object) -> Outcome:
    """A score that is a bounded number (tba/numbers.py), or a Failure."""
    if not isinstance(value, Real):
        return Failure("exception", f"the score is {value!r:.100}, not a number")
    try:
        number = float(value)
    except OverflowError:
        return Failure("too_large", "the score is an integer that no float holds")
    if not math.isfinite(number):
        return Failure("not_finite", f"the score is {number}")
    return number if is_bounded(number) else Failure("too_large", f"the score is {number:g}, beyond {MAX_NUMBER:g}")


def clean(text: str) -> str:
    """A detail that every wire takes: bounded, without lone surrogates."""
    return text[:MAX_DETAIL_CHARS].encode("utf-8", "replace").decode()
