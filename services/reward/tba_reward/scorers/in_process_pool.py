"""Score by a rule in worker processes. The rule may hang, crash, fork or exhaust memory; only the item fails then."""

from __future__ import annotations

from collections.abc import Sequence

from tba_reward.process_pool.job import WorkerRule
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import OK, Failure, Item, Outcome

_COSTLY = ("too_slow", "out_of_memory")
"""Failure reasons that either the response or the prompt's data may have caused."""


class ProcessPoolScorer:
    """Scores items in the pool.

    Args:
        rule: the rule that the workers apply.
        pool: shared by all scorers.
        timeout_s: CPU time that one item may take, or one batch as a whole.
        version: the version from `version_of`.
        example: an item whose score is 1, scored at start to see whether the rule works here; None: no such test.
        check: a rule that reads only the data, applied to an item that took too much time or memory. If it fails as
            well, the prompt's data is to blame, and not the response. None: the data cannot be to blame.
    """

    def __init__(
        self,
        rule: WorkerRule,
        *,
        pool: WorkerPool,
        timeout_s: float,
        version: str,
        example: Item | None = None,
        check: WorkerRule | None = None,
    ) -> None:
        self._rule, self._pool, self._timeout_s, self._check = rule, pool, timeout_s, check
        self.version, self._example = version, example
        self._example_health = "its example was not scored yet"

    async def start(self) -> None:
        """Load the rule in a worker, then score the example; `health` says the result."""
        await self._pool.prepare(self._rule)
        outcome = 1.0 if self._example is None else (await self.score([self._example]))[0]
        if isinstance(outcome, Failure):
            self._example_health = f"its example failed ({outcome.reason}: {outcome.detail})"
        elif outcome != 1.0:
            # a scorer that works but scores otherwise, for example with another release of a package
            self._example_health = f"its example scored {outcome}, not 1.0"
        else:
            self._example_health = OK

    async def close(self) -> None:
        """Do nothing: the pool belongs to the service."""

    def health(self) -> str:
        """Return `ok` if the pool runs, the rule is loaded and the example got the score 1; else what is wrong."""
        state = self._pool.health(self._rule)
        return self._example_health if state == OK else state

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order."""
        outcomes = await self._pool.score(self._rule, items, self._timeout_s)
        if self._check is None:
            return outcomes
        # a gold answer that takes too long by itself would count against every response to its prompt
        places = [at for at, each in enumerate(outcomes) if isinstance(each, Failure) and each.reason in _COSTLY]
        checks = await self._pool.score(self._check, [items[at] for at in places], self._timeout_s)
        for at, checked in zip(places, checks, strict=True):
            if isinstance(checked, Failure):
                is_data = checked.reason in (*_COSTLY, "bad_data")
                outcomes[at] = Failure(
                    "bad_data" if is_data else checked.reason, f"the prompt's data: {checked.detail}"
                )
        return outcomes
