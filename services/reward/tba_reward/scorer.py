"""The types of scoring: items, outcomes, rules and the `Scorer` protocol; and the scorer that applies a rule inline."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from tba.api.scores import ScoreReason
from tba.config.reward import ScorerSpec
from tba.errors import TbaError, not_installed
from tba.fields import MAX_NUMBER, is_bounded
from tba.tls import with_bare_urls

OK = "ok"
MAX_DETAIL_CHARS, MAX_ERROR_CHARS = 500, 400
"""Longest detail, and longest text in it of an exception: the place behind it is not cut off."""
NOT_OF_SCORES = {
    *("weight", "gate", "timeout_s"),
    *("model", "victim", "classifier"),
    *("device", "trust_remote_code", "batch_tokens", "batch_wait_s", "num_threads"),
}
"""Fields of a spec that do not decide what its scores are: they say how a score is used, or where and how models run.
The digest of the model files is part of the version instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One completion to score."""

    prompt: str
    response: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's data for its reward, for example a gold answer."""
    finish_reason: str = "stop"
    """`stop`, `stop_string`, `length` or `abort`."""
    response_tokens: Sequence[int] | None = None
    """The response as token ids; None if the client has not sent them."""

    @property
    def is_finished(self) -> bool:
        """Whether the response ended by itself, and was not cut off."""
        return self.finish_reason not in ("length", "abort")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no score."""

    reason: ScoreReason
    detail: str
    """A text that is stored with the rollout, exported, and shown to everybody by /readyz; its URLs hold no secrets."""

    def __post_init__(self) -> None:
        """Remove user, password and options from the URLs in the detail."""
        object.__setattr__(self, "detail", with_bare_urls(self.detail))


Outcome = float | Failure
"""A bounded score, or why there is none."""


class Scorer(Protocol):
    """Scores items; one object serves all requests of the service, on its event loop.

    **A function of your own needs no scorer.** The kind `python` calls a function in worker processes that are killed
    at a deadline. The recipe names it by its import path:

        scorers = [{kind = "python", function = "my_module:my_reward"}]

    **A new kind of scorer** is one file, `tba_reward/scorers/KIND.py`, and a class of settings in tba/config/reward.py
    with `kind: Literal["KIND"]` that is a member of AnyScorerSpec. The file has a function

        def build(spec: KindSpec, tools: Tools) -> Scorer: ...

    `build` starts nothing and runs no foreign code. It raises ConfigError for an error that it can see without that,
    for example a package that is not installed. Most kinds return one of these scorers, and only have to write a
    `Rule`:

        InlineScorer       (below)                       a rule in a thread of the service; its time must be bounded by
                                                         the length of the text
        ProcessPoolScorer  (scorers/in_process_pool.py)  a rule in worker processes that are killed at the deadline
        ModelServerScorer  (scorers/in_model_server.py)  a neural network in a process of its own

    The calls in order: `build`; `start`, repeated every 10 s until `health` is `ok`; many `score` calls at once;
    `close`. A failed score is unknown, never a number.
    """

    @property
    def version(self) -> str:
        """Digest of everything that decides what a score is, from `version_of`; final once `start` has returned.

        It changes whenever the same item may get another score, because cached scores are looked up by it.
        """
        ...

    async def start(self) -> None:
        """Load what `score` needs. An exception is shown in `/readyz`, and `start` is called again later."""
        ...

    async def close(self) -> None:
        """Stop everything that was started; `score` calls in progress return Failures."""
        ...

    def health(self) -> str:
        """Return `ok`, or a sentence that says what is wrong. Called often: it must not wait."""
        ...

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order.

        An item never makes it raise: an item without a score gets a Failure. It returns by the deadline of its items
        (`timeout_s`). When it is cancelled, it stops all work for these items.
        """
        ...


Params = Mapping[str, Any]
"""Settings of a rule, as JSON values."""
Rule = Callable[[Item, Params], float]
"""(item, params) -> score. A rule raises NoScoreError for "no score", keeps no state, and is a top-level function."""
BatchRule = Callable[[Sequence[Item], Params], list[Outcome]]
"""(items, params) -> one outcome per item, in order. An item may make it raise MemoryError, and nothing else."""


class NoScoreError(TbaError, ValueError):
    """A rule cannot score an item; `reason` becomes the reason of its Failure."""

    slug = "no-score"
    status = 422
    reason: ScoreReason = "exception"


class BadDataError(NoScoreError):
    """The prompt's data is not what the rule needs."""

    slug = "bad-data"
    reason: ScoreReason = "bad_data"


class AmbiguousError(NoScoreError):
    """The response cannot be read, or can be read in more than one way: it is neither right nor wrong."""

    slug = "ambiguous"
    reason: ScoreReason = "ambiguous"


def outcome_of(rule: Rule, item: Item, params: Params) -> Outcome:
    """Apply a rule to an item and return its score; every exception becomes a Failure."""
    try:
        return checked(rule(item, params))
    except (Exception, SystemExit) as error:  # a rule may be foreign code and raise anything; it is reported
        return failure_of(error)


def failure_of(error: BaseException) -> Failure:
    """Return the Failure for an exception that a rule has raised."""
    if isinstance(error, NoScoreError):
        return Failure(error.reason, str(error))
    if isinstance(error, MemoryError):
        return Failure("out_of_memory", f"MemoryError: {error}")
    return Failure("exception", exception_text(error))


def exception_text(error: BaseException) -> str:
    """Return `TYPE: TEXT`, and ` (FILE:LINE)` if the last note of the exception says that place."""
    places = [f" ({note})" for note in getattr(error, "__notes__", ())[-1:]]
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] + "".join(places)


def checked(value: object) -> Outcome:
    """Return a value as a score if it is a bounded number (tba/fields.py), else a Failure."""
    # Real and not float: numpy's numbers, fractions and True are scores too
    if not isinstance(value, Real):
        return Failure("exception", f"the score is {value!r:.100}, not a number")
    try:
        # an integer of a thousand digits is possible in Python
        number = float(value)
    except OverflowError:
        return Failure("too_large", "the score is an integer that is too large for a float")
    if not math.isfinite(number):
        return Failure("not_finite", f"the score is {number}")
    return number if is_bounded(number) else Failure("too_large", f"the score is {number:g}, beyond {MAX_NUMBER:g}")


def gold_answers(item: Item, field: str) -> Sequence[object]:
    """Return the gold answers of an item: the members of a list (each of them is right), or the single answer."""
    value = item.data.get(field)
    golds = value if isinstance(value, list) else [value]
    if not golds:
        raise BadDataError(f"data needs a gold answer in `{field}`, got an empty list")
    return golds


def score_any(golds: Sequence[object], rule: Callable[[object], bool]) -> float:
    """Return 1.0 if `rule` is true for one of the gold answers, else 0.0.

    Raises:
        BadDataError: the rule raised it for a gold answer, and is true for no other one.
    """
    bad: BadDataError | None = None
    for gold in golds:
        try:
            if rule(gold):
                return 1.0
        except BadDataError as error:
            # the answer may still be equal to another gold answer, which then decides
            bad = bad or error
    if bad is not None:
        raise bad
    return 0.0


def params_of(spec: ScorerSpec) -> dict[str, Any]:
    """Return the fields of a spec that decide what its scores are, as JSON values."""
    return spec.model_dump(mode="json", exclude=NOT_OF_SCORES)


def version_of(spec: ScorerSpec, implementation: int, *digests: str) -> str:
    """Return the hexadecimal digest of everything that decides what a score is.

    Args:
        implementation: a number that grows whenever the code may give another score for the same input.
        digests: texts for everything else that decides, for example digests of model files, or package versions.
    """
    document = json.dumps([params_of(spec), implementation, *digests], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def installed_version(kind: str, package: str) -> str:
    """Return the version of a package that a kind of scorer needs; raise ConfigError if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise not_installed(f"reward kind {kind!r}", package) from None


def clean(text: str) -> str:
    """Return a detail that can be sent as JSON: cut to MAX_DETAIL_CHARS, and without lone surrogates."""
    return text[:MAX_DETAIL_CHARS].encode("utf-8", "replace").decode()


INLINE_CHUNK_ITEMS = 64
# beside the event loop, which answers health checks meanwhile; more threads would only compete for the interpreter
_INLINE_THREAD = ThreadPoolExecutor(1, thread_name_prefix="inline-scorer")


class InlineScorer:
    """Applies a rule to one item after another in a thread; concurrent requests take turns by chunks of items."""

    def __init__(self, rule: Rule, params: Params, *, version: str) -> None:
        self._rule, self._params, self.version = rule, params, version

    async def start(self) -> None:
        """Do nothing: there is nothing to load."""

    async def close(self) -> None:
        """Do nothing: there is nothing to stop."""

    def health(self) -> str:
        """Return `ok`."""
        return OK

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order."""
        loop, outcomes = asyncio.get_running_loop(), list[Outcome]()

        def score_chunk(at: int) -> list[Outcome]:
            return [outcome_of(self._rule, item, self._params) for item in items[at : at + INLINE_CHUNK_ITEMS]]

        for at in range(0, len(items), INLINE_CHUNK_ITEMS):
            outcomes += await loop.run_in_executor(_INLINE_THREAD, score_chunk, at)
        return outcomes
