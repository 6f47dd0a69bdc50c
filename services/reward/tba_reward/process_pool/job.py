"""The pool's rules and jobs. A job is one message to a worker, with the futures that wait for its outcomes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tba_reward.child_messages import ItemMessage, LoadRule, ScoreItems, frame
from tba_reward.scorer import Failure, Item, Outcome, Params

ItemKey = tuple[int, str, str]
"""Rule number, prompt, and the prompt's data as JSON."""
_next_number: Callable[[], int] = itertools.count().__next__


@dataclass(frozen=True, kw_only=True)
class WorkerRule:
    """A scoring rule that worker processes import by its name.

    Attributes:
        function: `module:name` of a Rule, or of a BatchRule if `batch_items` is given.
        params: JSON values that the function gets in every call.
        prepare: `module:name` of a function (params) -> None that each worker calls once before its first item. It has
            its own deadline (`WORKER_START_S` of app.py), so slow imports belong here.
        batch_items: most items of one call of a BatchRule; None: the function is a Rule.
    """

    function: str
    params: Params = field(default_factory=dict)
    prepare: str | None = None
    batch_items: int | None = None

    @property
    def key(self) -> str:
        """A text that is the same for equal rules."""
        return json.dumps([self.function, dict(self.params), self.prepare, self.batch_items], sort_keys=True)


@dataclass(eq=False, slots=True)
class PoolRule:
    """A rule, with the pool's record of its loads and of how long its jobs take.

    Attributes:
        number: identifies the rule in messages.
        is_proven: whether a worker has loaded it. Until then only one worker at a time tries: the load may kill it.
        num_load_crashes: workers in a row that died while they loaded it.
        load_error: why it could not be loaded; None: no error, or another attempt is due.
        retry_at_s: event loop time of the next attempt after a load error.
        longest_s: wall-clock time of the longest recent reply to a job; None: there was none.
    """

    number: int
    rule: WorkerRule
    is_proven: bool = False
    num_load_crashes: int = 0
    load_error: str | None = None
    retry_at_s: float = 0.0
    longest_s: float | None = None

    @property
    def may_hang(self) -> bool:
        """Whether the rule takes batches: it is then foreign code, which may hang."""
        return self.rule.batch_items is not None


@dataclass(eq=False, slots=True)
class Job:
    """One message to a worker, and the futures that get its outcomes. A job without items loads the rule.

    Attributes:
        timeout_s: CPU time that one item, or a batch as a whole, may take; wall-clock time that a load may take.
        futures: one per item, in order, for the item's outcome; empty for a load.
        num_done: items with an outcome. A worker applies a Rule to one item after another, a BatchRule to all at once.
        num_crashes: workers that died while they worked on it.
        took_s: wall-clock seconds that the worker took for its last reply.
        number: identifies the message and its replies.
        frame: the message as bytes.

    Raises:
        TypeError, ValueError, RecursionError: an item's text cannot be encoded, or its data has no JSON form.
    """

    rule: PoolRule
    timeout_s: float
    items: Sequence[Item] = ()
    futures: Sequence[asyncio.Future[Outcome]] = ()
    num_done: int = 0
    num_crashes: int = 0
    took_s: float = 0.0
    number: int = field(default_factory=_next_number)
    frame: bytes = field(init=False)
    _is_split: bool = False

    def __post_init__(self) -> None:
        """Encode the message."""
        rule = self.rule.rule
        if self.is_load:
            params = json.dumps(dict(rule.params))
            message = LoadRule(self.number, self.rule.number, rule.function, params, rule.prepare, self.rule.may_hang)
            self.frame = frame(message)
            return
        messages = [
            ItemMessage(
                item.prompt,
                item.response,
                # as JSON, which has whole numbers of any size; msgpack has not
                json.dumps(dict(item.data)),
                item.finish_reason,
                None if item.response_tokens is None else list(item.response_tokens),
            )
            for item in self.items
        ]
        self.frame = frame(ScoreItems(self.number, self.rule.number, messages))

    @property
    def is_load(self) -> bool:
        """Whether the job loads the rule and scores no items."""
        return not self.items

    @property
    def may_hang(self) -> bool:
        """Whether the job scores items by foreign code, which may hang."""
        return not self.is_load and self.rule.may_hang

    @property
    def prompts(self) -> set[ItemKey]:
        """The keys of the prompts of its items."""
        return {(self.rule.number, item.prompt, json.dumps(dict(item.data), sort_keys=True)) for item in self.items}

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for its items any more."""
        return not self.is_load and all(future.done() for future in self.futures)

    @property
    def is_done(self) -> bool:
        """Whether every item has its outcome, or the load has ended."""
        return self.num_done >= max(len(self.items), 1)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Set the outcomes of the next items on their futures."""
        for future, outcome in zip(self.futures[self.num_done :], outcomes, strict=False):
            # the items of a split job are scored twice: the first outcome counts
            if not future.done():
                future.set_result(outcome)
        self.num_done += len(outcomes)

    def fail(self, failure: Failure) -> None:
        """Set the same Failure on the futures of all items without an outcome."""
        self.settle([failure] * (len(self.futures) - self.num_done))

    def part(self, start: int, end: int | None = None) -> Job:
        """Return a new job for the items from index `start` up to, not including, `end`."""
        return Job(self.rule, self.timeout_s, self.items[start:end], self.futures[start:end])

    def split(self) -> list[Job]:
        """Return one job per item without outcome, last item first, for `deque.extendleft`; [] after the first call."""
        if self._is_split:
            return []
        self._is_split = True
        return [self.part(at, at + 1) for at in reversed(range(len(self.futures))) if not self.futures[at].done()]
