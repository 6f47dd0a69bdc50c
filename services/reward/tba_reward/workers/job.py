"""One thing for a worker to do."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tba_reward.scorers.base import Failure, Item, Outcome
from tba_reward.workers.messages import ItemMessage, Score, encode

_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class Job:
    """A message to a worker, and where its outcomes go.

    Attributes:
        rule: number of its rule.
        frame: the message as bytes.
        timeout_s: CPU time of the worker that it may take, all items together; where it loads a rule, wall-clock time.
        futures: each gets one outcome, in order: one per item, or that of a preparation.
        items: what is scored; none for a preparation.
        num_holders: workers that have it now.
        num_crashes: workers that died while they worked on it.
    """

    rule: int
    frame: bytes
    timeout_s: float
    futures: Sequence[asyncio.Future[Outcome]]
    items: Sequence[Item] = ()
    num_holders: int = 0
    num_crashes: int = 0

    @property
    def is_prepare(self) -> bool:
        """Whether it loads the rule, rather than scores items by it."""
        return not self.items

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(future.done() for future in self.futures)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Give its outcomes to whoever waits; the first ones count."""
        for future, outcome in zip(self.futures, outcomes, strict=False):
            if not future.done():
                future.set_result(outcome)

    def fail(self, failure: Failure) -> None:
        """The same failure for whoever waits."""
        self.settle([failure] * len(self.futures))


def score_job(rule: int, items: Sequence[Item], timeout_s: float, futures: Sequence[asyncio.Future[Outcome]]) -> Job:
    """Items for one call of a rule.

    Raises:
        TypeError, ValueError, RecursionError: an item is no text, or its data is what JSON cannot say.
    """
    messages = [
        ItemMessage(
            item.prompt,
            item.response,
            json.dumps(dict(item.data)),
            item.finish_reason,
            None if item.response_tokens is None else list(item.response_tokens),
        )
        for item in items
    ]
    return Job(rule, encode(Score(next_number(), rule, messages)), timeout_s, futures, items)


def alone(job: Job) -> list[Job]:
    """A job for each item of this one that somebody waits for; this one is over with that. None the second time: two
    workers may have had it."""
    pairs = zip(job.items, job.futures, strict=False)
    jobs = [score_job(job.rule, [item], job.timeout_s, [future]) for item, future in pairs if not future.done()]
    job.futures = ()
    return jobs


def next_number() -> int:
    """The number of the next message."""
    return next(_numbers)
