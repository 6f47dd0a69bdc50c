"""One thing for a worker to do."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from tba_reward.scorers.base import Outcome

_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class Job:
    """A message to a worker, and where its outcome goes.

    Attributes:
        rule: number of its rule.
        frame: the message as bytes.
        timeout_s: from when a worker takes it up.
        future: gets its outcome; None where nobody waits.
        is_prepare: whether it loads the rule, rather than scores an item by it.
        num_holders: workers that have it now.
        num_crashes: workers that died while they worked on it.
    """

    rule: int
    frame: bytes
    timeout_s: float
    future: asyncio.Future[Outcome] | None = None
    is_prepare: bool = False
    num_holders: int = 0
    num_crashes: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future is not None and self.future.done()

    def settle(self, outcome: Outcome) -> None:
        """Give its outcome to whoever waits; the first one counts."""
        if self.future is not None and not self.future.done():
            self.future.set_result(outcome)


def next_number() -> int:
    """The number of the next message."""
    return next(_numbers)
