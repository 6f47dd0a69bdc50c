"""A rule that runs in the worker processes: it may hang, crash, fork or eat memory, and only its item suffers."""

from __future__ import annotations

from collections.abc import Sequence

from tba_reward.scorers.base import Example, Failure, Item, Outcome
from tba_reward.scorers.example import OK, try_example
from tba_reward.workers.pool import WorkerPool
from tba_reward.workers.rule import WorkerRule

_COSTLY = ("too_slow", "out_of_memory")


class WorkerScorer:
    """Gives items to the pool.

    Args:
        rule: what the workers call.
        pool: shared by all scorers; started by the first one that starts.
        timeout_s: CPU time that one item may take, or a batch of the rule's as a whole.
        version: see `version_of`.
        example: scored at start; None: nothing is known that could be.
        check: asked of an item that took too much time or memory: when that fails too, the item's data is to blame, and
            not its response. None: the data decides nothing.
    """

    def __init__(
        self,
        rule: WorkerRule,
        *,
        pool: WorkerPool,
        timeout_s: float,
        version: str,
        example: Example | None,
        check: WorkerRule | None = None,
    ) -> None:
        self._rule, self._pool, self._timeout_s, self._check = rule, pool, timeout_s, check
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
        outcomes = await self._pool.score(self._rule, items, self._timeout_s)
        if self._check is None:
            return outcomes
        places = [at for at, each in enumerate(outcomes) if isinstance(each, Failure) and each.reason in _COSTLY]
        checks = await self._pool.score(self._check, [items[at] for at in places], self._timeout_s)
        for at, checked in zip(places, checks, strict=True):
            if isinstance(checked, Failure):
                is_data = checked.reason in (*_COSTLY, "bad_data")
                outcomes[at] = Failure(
                    "bad_data" if is_data else checked.reason, f"the prompt's data: {checked.detail}"
                )
        return outcomes
