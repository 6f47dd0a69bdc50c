"""Score by a rule inside the service: only for rules whose time is bounded by the length of the text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tba_reward.scorer import Example, Item, Outcome, Params, Rule, outcome_of, try_example

CHUNK_ITEMS = 64
CHUNK_CHARS = 100_000
# beside the event loop, which answers health checks meanwhile; more threads would only compete for the interpreter
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="inline-scorer")


class InlineScorer:
    """Applies a rule to one item after the other, off the event loop; requests take turns after each chunk of items.

    Args:
        rule: a function without state.
        params: its settings.
        version: see `version_of`.
        example: scored at start.
    """

    def __init__(self, rule: Rule, params: Params, *, version: str, example: Example) -> None:
        self._rule, self._params, self._example = rule, params, example
        self._version = version
        self._health = "its example was not scored yet"

    @property
    def version(self) -> str:
        """The digest of rule and params."""
        return self._version

    async def start(self) -> None:
        """Score the example."""
        self._health = await try_example(self, self._example)

    async def close(self) -> None:
        """Do nothing: there is nothing to stop."""

    def health(self) -> str:
        """Return `ok` once the example has got its score."""
        return self._health

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order."""
        loop, outcomes = asyncio.get_running_loop(), list[Outcome]()
        for chunk in _chunks(items):
            outcomes += await loop.run_in_executor(_THREAD, self._score_chunk, chunk)
        return outcomes

    def _score_chunk(self, items: Sequence[Item]) -> list[Outcome]:
        return [outcome_of(self._rule, item, self._params) for item in items]


def _chunks(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield the items in order, at most CHUNK_ITEMS at a time, and no item after CHUNK_CHARS are reached."""
    chunk, num_chars = list[Item](), 0
    for item in items:
        chunk.append(item)
        num_chars += len(item.prompt) + len(item.response)
        if len(chunk) >= CHUNK_ITEMS or num_chars >= CHUNK_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk
