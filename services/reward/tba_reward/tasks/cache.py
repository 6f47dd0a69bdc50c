"""A bounded cache of known scores by content; the least recently used one is evicted first."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence

from tba_reward.metrics import Metrics
from tba_reward.scorer import Failure, Item, Outcome, Scorer

CHUNK_ITEMS = 64
"""Items that a scorer is asked for at once. Scores are kept chunk by chunk, also where the request ends before."""


class ScoreCache:
    """Scores by content, of all scorers together. Failures are never kept: asked again, they may be scored.

    Args:
        max_items: most scores kept; 0: none.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._scores: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: bytes) -> float | None:
        """Return the score if it is known."""
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def put(self, key: bytes, score: float) -> None:
        """Keep a score; evict the least recently used ones beyond the bound."""
        if self._max_items:
            self._scores[key] = score
            self._scores.move_to_end(key)
            while len(self._scores) > self._max_items:
                self._scores.popitem(last=False)


class CachedScorer:
    """Asks another scorer for items whose score is not known, and only once for equal items of a batch.

    Args:
        scorer: the scorer that is asked.
        cache: shared with other scorers; the version is part of the key.
    """

    def __init__(self, scorer: Scorer, cache: ScoreCache, metrics: Metrics) -> None:
        self._scorer, self._cache, self._metrics = scorer, cache, metrics

    @property
    def version(self) -> str:
        """The version of the scorer."""
        return self._scorer.version

    async def start(self) -> None:
        """Start the scorer."""
        await self._scorer.start()

    async def close(self) -> None:
        """Close the scorer."""
        await self._scorer.close()

    def health(self) -> str:
        """Return the health of the scorer."""
        return self._scorer.health()

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order."""
        version = self._scorer.version
        keys = [content_key(version, item) for item in items]
        known: dict[bytes, Outcome] = {}
        asked: dict[bytes, Item] = {}
        for key, item in zip(keys, items, strict=True):
            if key in known or key in asked:
                continue
            score = self._cache.get(key)
            if score is None:
                asked[key] = item
            else:
                known[key] = score
        self._metrics.record_cache_hits(len(items) - len(asked))
        unknown = list(asked.items())
        chunks = [unknown[at : at + CHUNK_ITEMS] for at in range(0, len(unknown), CHUNK_ITEMS)]
        for found in await asyncio.gather(*(self._ask(chunk) for chunk in chunks)):
            known |= found
        return [known[key] for key in keys]

    async def _ask(self, chunk: Sequence[tuple[bytes, Item]]) -> dict[bytes, Outcome]:
        """Return outcomes by key, and keep the scores among them."""
        outcomes = await self._scorer.score([item for _, item in chunk])
        found = {key: outcome for (key, _), outcome in zip(chunk, outcomes, strict=True)}
        for key, outcome in found.items():
            # at once, not when the whole request is done: it may be cancelled before
            if not isinstance(outcome, Failure):
                self._cache.put(key, outcome)
        return found


def content_key(version: str, item: Item) -> bytes:
    """Return a digest of everything that a score may depend on."""
    tokens = "" if item.response_tokens is None else json.dumps(list(item.response_tokens))
    data = json.dumps(dict(item.data), sort_keys=True)
    parts = (version, item.prompt, item.response, item.finish_reason, data, tokens)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = part.encode("utf-8", "surrogatepass")
        # with its length: "a", "bc" and "ab", "c" are different contents
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.digest()
