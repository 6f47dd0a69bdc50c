"""Jobs of the pool: a rule that workers can find, and one message to a worker with the futures that wait for it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tba_reward.child_messages import ItemMessage, LoadRule, ScoreItems, frame
from tba_reward.scorer import Failure, Item, Outcome, Params

ItemKey = tuple[int, str, str]
"""Rule, prompt, data."""
_next_number: Callable[[], int] = itertools.count().__next__


@dataclass(frozen=True, kw_only=True)
class WorkerRule:
    """A rule that worker processes can find.

    Attributes:
        function: `module:name` of a Rule, or of a BatchRule where `batch_items` is given.
        params: given to it with every item; JSON values.
        prepare: `module:name` of a function (params) -> None that each worker calls once before its first item, under
            a deadline of its own (`WORKER_START_S` of app.py): slow imports belong here.
        batch_items: most items of one call of a BatchRule; None: the function is a Rule.
    """

    function: str
    params: Params = field(default_factory=dict)
    prepare: str | None = None
    batch_items: int | None = None

    @property
    def key(self) -> str:
        """Equal for two rules that are the same one."""
        return json.dumps([self.function, dict(self.params), self.prepare, self.batch_items], sort_keys=True)


@dataclass(eq=False, slots=True)
class PoolRule:
    """A rule as the pool knows it.

    Attributes:
        number: its name in messages.
        is_proven: a worker has loaded it. Until then one worker alone loads it, which it may kill.
        num_load_crashes: workers in a row that died while they loaded it.
        load_error: why it could not be loaded.
        retry_at_s: when that is tried again.
        longest_s: about the longest time that a job has taken lately; None: none is done.
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
        """Whether it is foreign code, which takes batches."""
        return self.rule.batch_items is not None


@dataclass(eq=False, slots=True)
class Job:
    """One message to a worker, and the futures that get its outcomes. Without items it loads the rule.

    Attributes:
        timeout_s: CPU time of the worker that one item may take, or a batch; wall-clock time where it loads a rule.
        futures: each gets one outcome, in order: one per item. Nobody waits for a load.
        num_done: items that have their outcome. A worker applies a Rule to one after the other, a BatchRule to all.
        num_crashes: workers that died while they worked on it.
        took_s: wall-clock time of its last reply.
        number: stands in the message and in its reply.
        frame: the message as bytes.

    Raises:
        TypeError, ValueError, RecursionError: an item is no text, or its data has no JSON form.
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
        """Whether it loads the rule, rather than scores items by it."""
        return not self.items

    @property
    def may_hang(self) -> bool:
        """Whether it calls foreign code."""
        return not self.is_load and self.rule.may_hang

    @property
    def prompts(self) -> set[ItemKey]:
        """The prompts of its items."""
        return {(self.rule.number, item.prompt, json.dumps(dict(item.data), sort_keys=True)) for item in self.items}

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for its items any more."""
        return not self.is_load and all(future.done() for future in self.futures)

    @property
    def is_done(self) -> bool:
        """Whether every item has its outcome, or the rule is loaded."""
        return self.num_done >= max(len(self.items), 1)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Give the outcomes of the next items to everyone who waits."""
        for future, outcome in zip(self.futures[self.num_done :], outcomes, strict=False):
            # the items of a split job are scored twice: the first outcome counts
            if not future.done():
                future.set_result(outcome)
        self.num_done += len(outcomes)

    def fail(self, failure: Failure) -> None:
        """Give the same failure to everyone who waits."""
        self.settle([failure] * (len(self.futures) - self.num_done))

    def part(self, start: int, end: int | None = None) -> Job:
        """Return a job for some of its items."""
        return Job(self.rule, self.timeout_s, self.items[start:end], self.futures[start:end])

    def split(self) -> list[Job]:
        """Return one job for each item that somebody still waits for, the last first; none if that was done before."""
        if self._is_split:
            return []
        self._is_split = True
        return [self.part(at, at + 1) for at in reversed(range(len(self.futures))) if not self.futures[at].done()]
