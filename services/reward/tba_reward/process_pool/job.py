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
RuleKey = tuple[str, str, str | None, bool, int | None]
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class WorkerRule:
    """A rule that worker processes can find.

    Attributes:
        function: `module:name` of a Rule, or of a BatchRule where `batch_items` is given.
        params: given to it with every item; JSON values.
        prepare: `module:name` of a function (params) -> None that is called once before the first item, under a
            deadline of its own (`WORKER_START_S` of app.py): slow imports belong here.
        preload: whether the fork server loads the rule once for all workers, so that a worker that replaces a killed
            one is ready at once. Only for modules of our own that start no threads: the server forks.
        batch_items: most items of one call of a BatchRule; None: the function is a Rule.
    """

    function: str
    params: Params = field(default_factory=dict)
    prepare: str | None = None
    preload: bool = False
    batch_items: int | None = None

    @property
    def key(self) -> RuleKey:
        """Equal for two rules that are the same one."""
        return self.function, self.params_json, self.prepare, self.preload, self.batch_items

    @property
    def params_json(self) -> str:
        """The params as text."""
        return json.dumps(dict(self.params), sort_keys=True)


@dataclass(eq=False, slots=True)
class Job:
    """One message to a worker, and the futures that get its outcomes.

    Attributes:
        rule: number of its rule.
        frame: the message as bytes.
        timeout_s: CPU time of the worker that it may take, all items together; wall-clock time where it loads a rule.
        futures: each gets one outcome, in order: one per item, or one for the load.
        items: the items to score; none where it loads a rule.
        num_holders: workers that have it now.
        num_crashes: workers that died while they worked on it.
        took_s: wall-clock time that it took, once it is done.
        is_split: whether each of its items has a job of its own.
    """

    rule: int
    frame: bytes
    timeout_s: float
    futures: Sequence[asyncio.Future[Outcome]]
    items: Sequence[Item] = ()
    num_holders: int = 0
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
        """Whether nobody waits for it any more."""
        return all(future.done() for future in self.futures)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Give the outcomes to everyone who waits."""
        for future, outcome in zip(self.futures, outcomes, strict=False):
            # a stolen job is done by two workers: the first outcome counts
            if not future.done():
                future.set_result(outcome)

    def fail(self, failure: Failure) -> None:
        """Give the same failure to everyone who waits."""
        self.settle([failure] * len(self.futures))


def load_job(number: int, rule: WorkerRule, timeout_s: float) -> Job:
    """Return the job that loads a rule in a worker."""
    is_batch = rule.batch_items is not None
    message = LoadRule(next(_numbers), number, rule.function, rule.params_json, rule.prepare, is_batch)
    return Job(number, encode(message), timeout_s, [asyncio.get_running_loop().create_future()])


def score_job(rule: int, items: Sequence[Item], timeout_s: float, futures: Sequence[asyncio.Future[Outcome]]) -> Job:
    """Return the job that scores items in one call of a rule.

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
    return Job(rule, encode(ScoreItems(next(_numbers), rule, messages)), timeout_s, futures, items)


def split_job(job: Job) -> list[Job]:
    """Return one job for each item that somebody still waits for; the first outcome of an item counts."""
    job.is_split = True
    pairs = zip(job.items, job.futures, strict=False)
    return [score_job(job.rule, [item], job.timeout_s, [future]) for item, future in pairs if not future.done()]
