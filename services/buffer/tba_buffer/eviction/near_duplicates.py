"""The search for near duplicates: rollouts that are nearly the same as a better one of their prompt.

This is the diversity filter of red-teaming. Two responses are near when their edit distance in tokens is below `share`
times the sum of their lengths, as in the replay buffer of https://github.com/GFNOrg/red-teaming (arXiv 2405.18540;
`sim_tolerance` there). When two scored rollouts are near, the one with the higher reward stays; with equal rewards,
the older one. Afterwards no two scored rollouts of a prompt are near.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from tba.errors import WireError
from tba.wire import decode_rollout
from tba_buffer.index.log import SCORED
from tba_buffer.index.rollout_index import Index
from tba_buffer.storage.context import Context
from tba_buffer.storage.redis_client import redis_errors

IDS_PER_READ = 512
NO_POSITIONS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One scored rollout as the comparison needs it; `codes` has one character for each response token."""

    position: int
    prompt: int
    reward: float
    codes: str


class NearDuplicateSearch:
    """Finds near duplicates. It remembers the tokens of stored rollouts, and which rollouts it has compared.

    Args:
        share: the distance below which two responses are near, as a share of the sum of their lengths.
    """

    def __init__(self, context: Context, share: float) -> None:
        self._context = context
        self._share = share
        self._index: Index | None = None
        self._codes: dict[int, str] = {}
        self.compared: set[int] = set()
        """Log positions of the scored rollouts that were compared and kept. A failed enforcement clears it."""

    async def find(self, index: Index) -> NDArray[np.int64]:
        """Return the log positions of the near duplicates to evict, ascending.

        The caller holds `Context.mutation_lock`, so nobody else changes or removes stored rollouts meanwhile.
        """
        if index is not self._index:  # after a loss Redis gives the lost positions to other rollouts
            self._index, self._codes, self.compared = index, {}, set()
        rows = index.live_rows()
        rows = rows[index.column("status", rows) == SCORED]
        stored = set(index.column("position", rows).tolist())
        new = stored - self.compared
        if not new:
            return NO_POSITIONS
        prompts = index.column("prompt", rows)
        is_new = np.isin(index.column("position", rows), list(new))
        rows = rows[np.isin(prompts, prompts[is_new])]  # a rollout is compared with those of its prompt alone
        positions = index.column("position", rows).tolist()
        prompts, rewards = index.column("prompt", rows).tolist(), index.column("reward", rows).tolist()
        # evicted rollouts must not stay in memory
        for position in self._codes.keys() - stored:
            del self._codes[position]
        ids = zip(positions, index.rollout_ids(rows), strict=True)
        unknown = [(position, rollout_id) for position, rollout_id in ids if position not in self._codes]
        for first in range(0, len(unknown), IDS_PER_READ):
            part = unknown[first : first + IDS_PER_READ]
            with redis_errors("read the tokens of rollouts to compare"):
                payloads = await self._context.redis.hmget(self._context.keys.payloads, [id_ for _, id_ in part])
            for (position, _), payload in zip(part, payloads, strict=True):
                try:
                    self._codes[position] = to_codes(decode_rollout(payload or b"").response_tokens)
                except WireError:  # it is gone or damaged; no codes are near to nothing
                    self._codes[position] = ""
        live = [
            Candidate(position, prompt, reward, self._codes[position])
            for position, prompt, reward in zip(positions, prompts, rewards, strict=True)
        ]
        # edit distances over a whole prompt would hold up every request
        gone = await asyncio.to_thread(find_losers, live, self.compared, self._share)
        self.compared = stored.difference(gone)
        return np.array(sorted(gone), dtype=np.int64)


def to_codes(tokens: NDArray[np.int32]) -> str:
    """Return token ids [R] as a string of R characters, because rapidfuzz compares strings fastest.

    All ids above the range of Unicode become its last character, U+10FFFF.
    """
    return np.minimum(tokens, 0x10FFFF).astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def find_losers(live: Iterable[Candidate], compared: set[int], share: float) -> set[int]:
    """Return the log positions of the rollouts to evict, so that no two rollouts of a prompt are near.

    Args:
        live: the scored rollouts, by ascending log position.
        compared: positions of rollouts that are known not to be near to each other.
        share: as for `NearDuplicateSearch`.
    """
    by_prompt: dict[int, list[Candidate]] = {}
    for rollout in live:
        by_prompt.setdefault(rollout.prompt, []).append(rollout)
    gone: set[int] = set()
    for rollouts in by_prompt.values():
        kept = [rollout for rollout in rollouts if rollout.position in compared]
        for rollout in rollouts:
            if rollout.position not in compared:
                near = _near(rollout, kept, share)
                if any(other.reward >= rollout.reward for other in near):
                    gone.add(rollout.position)
                else:
                    gone.update(other.position for other in near)
                    kept = [other for other in kept if other.position not in gone]
                    kept.append(rollout)
    return gone


def _near(rollout: Candidate, others: Sequence[Candidate], share: float) -> list[Candidate]:
    if not others or not rollout.codes:
        return []
    limits = share * (len(rollout.codes) + np.array([len(other.codes) for other in others]))  # [N]
    distances = cdist(
        [rollout.codes],
        [other.codes for other in others],
        scorer=Levenshtein.distance,
        score_cutoff=int(limits.max()),
        dtype=np.int32,
    )[0]  # [N], beyond the cutoff the cutoff plus 1
    return [others[n] for n in np.flatnonzero(distances < limits)]
