"""Jobs of the pool: a rule that workers can find, and one message to a worker with the futures that wait for it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tba_reward.process_pool.pool_messages import ItemMessage, LoadRule, ScoreItems, encode
from tba_reward.scorer import Failure, Item, Outcome, Params

ItemKey = tuple[int, str, str]
"""Rule, prompt, data."""
RuleKey = tuple[str, str, str | None, int | None]
_numbers = itertools.count()


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
    def key(self) -> RuleKey:
        """Equal for two rules that are the same one."""
        return self.function, self.params_json, self.prepare, self.batch_items

    @property
    def params_json(self) -> str:
        """The params as text."""
        return json.dumps(dict(self.params), sort_keys=True)


@dataclass(eq=False, slots=True)
class Job:
    """One message to a worker, and the futures that get its outcomes.

    Attributes:
        number: stands in the message and in its reply.
        rule: number of its rule.
        frame: the message as bytes.
        timeout_s: CPU time of the worker that one item may take, or a batch; wall-clock time where it loads a rule.
        futures: each gets one outcome, in order: one per item. Nobody waits for a load.
        items: the items to score; none where it loads a rule.
        num_done: items that have their outcome. A worker applies a Rule to one after the other, a BatchRule to all.
        num_crashes: workers that died while they worked on it.
        took_s: wall-clock time of its last reply.
        is_split: whether each of its items has a job of its own.
    """

    number: int
    rule: int
    frame: bytes
    timeout_s: float
    futures: Sequence[asyncio.Future[Outcome]] = ()
    items: Sequence[Item] = ()
    num_done: int = 0
    num_crashes: int = 0
    took_s: float = 0.0
    is_split: bool = False

    @property
    def is_load(self) -> bool:
        """Whether it loads the rule, rather than scores items by it."""
        return not self.items

    @property
    def prompts(self) -> set[ItemKey]:
        """The prompts of its items."""
        return {(self.rule, item.prompt, json.dumps(dict(item.data), sort_keys=True)) for item in self.items}

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


def load_job(number: int, rule: WorkerRule, timeout_s: float) -> Job:
    """Return the job that loads a rule in a worker."""
    job = next(_numbers)
    is_batch = rule.batch_items is not None
    return Job(
        job, number, encode(LoadRule(job, number, rule.function, rule.params_json, rule.prepare, is_batch)), timeout_s
    )


def score_job(rule: int, items: Sequence[Item], timeout_s: float, futures: Sequence[asyncio.Future[Outcome]]) -> Job:
    """Return the job that scores items.

    Raises:
        TypeError, ValueError, RecursionError: an item is no text, or its data has no JSON form.
    """
    messages = [
        ItemMessage(
            item.prompt,
            item.response,
            # as JSON, which has whole numbers of any size; msgpack has not
            json.dumps(dict(item.data)),
            item.finish_reason,
            None if item.response_tokens is None else list(item.response_tokens),
        )
        for item in items
    ]
    job = next(_numbers)
    return Job(job, rule, encode(ScoreItems(job, rule, messages)), timeout_s, futures, items)


def split_job(job: Job) -> list[Job]:
    """Return one job for each item that somebody still waits for; the first outcome of an item counts."""
    job.is_split = True
    pairs = zip(job.items, job.futures, strict=False)
    return [score_job(job.rule, [item], job.timeout_s, [future]) for item, future in pairs if not future.done()]
