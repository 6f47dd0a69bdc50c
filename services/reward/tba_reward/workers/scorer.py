"""A rule that runs in the worker processes: it may hang, crash, fork or eat memory, and only its item suffers."""

from __future__ import annotations

from collections.abc import Sequence

from tba_reward.scorers.base import Example, Item, Outcome
from tba_reward.scorers.example import OK, try_example
from tba_reward.workers.pool import WorkerPool
from tba_reward.workers.rule import WorkerRule


class WorkerScorer:
    """Gives items to the pool.

    Args:
        rule: what the workers call.
        pool: shared by all scorers; started by the first one that starts.
        timeout_s: deadline of one item, from when a worker takes it up.
        version: see `version_of`.
        example: scored at start; None: nothing is known that could be.
    """

    def __init__(
        self, rule: WorkerRule, *, pool: WorkerPool, timeout_s: float, version: str, example: Example | None
    ) -> None:
        self._rule, self._pool, self._timeout_s = rule, pool, timeout_s
        self._version, self._example = version, example
        self._example_health = "its example was not scored yet"

    @property
    def version(self) -> str:
        """Digest of rule and params."""
        return self._version

    async def start(self) -> None:
        """Start the pool if nobody has, prepare the rule, score the example."""
        await self._pool.start()
        await self._pool.prepare(self._rule)
        self._example_health = OK if self._example is None else await try_example(self, self._example)

    async def close(self) -> None:
        """Nothing to stop: the pool belongs to the service."""

    def health(self) -> str:
        """Whether the pool runs, the rule could be prepared and the example scores what it should."""
        state = self._pool.health(self._rule)
        return self._example_health if state == OK else state

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item, in order."""
        return await self._pool.score(self._rule, items, self._timeout_s)
