"""A rule that runs inside the service, on its event loop: only for rules whose time the length of the text bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tba_reward.scorers.base import Example, Item, Outcome, Params, Rule, outcome_of
from tba_reward.scorers.example import try_example

CHUNK_ITEMS = 64
CHUNK_CHARS = 100_000


class InlineScorer:
    """Applies a rule to item after item; the event loop runs on between chunks of them.

    Args:
        rule: a function without state.
        params: what it is told.
        version: see `version_of`.
        example: scored at start.
    """

    def __init__(self, rule: Rule, params: Params, *, version: str, example: Example) -> None:
        self._rule, self._params, self._example = rule, params, example
        self._version = version
        self._health = "its example was not scored yet"

    @property
    def version(self) -> str:
        """Digest of rule and params."""
        return self._version

    async def start(self) -> None:
        """Score the example."""
        self._health = await try_example(self, self._example)

    async def close(self) -> None:
        """Nothing to stop."""

    def health(self) -> str:
        """Whether the example scores what it should."""
        return self._health

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item, in order."""
        outcomes: list[Outcome] = []
        num_items = num_chars = 0
        for item in items:
            outcomes.append(outcome_of(self._rule, item, self._params))
            num_items, num_chars = num_items + 1, num_chars + len(item.prompt) + len(item.response)
            if num_items >= CHUNK_ITEMS or num_chars >= CHUNK_CHARS:
                num_items = num_chars = 0
                await asyncio.sleep(0)
        return outcomes
