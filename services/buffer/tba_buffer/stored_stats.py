"""What is stored, in detail: by policy version, policy age, length and reward. Pure functions of an index."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tba.api import StoredStats
from tba.api.stats import NUM_DECILES
from tba.versions import LineageTree, PolicyVersion
from tba_buffer.bounds import length_bucket
from tba_buffer.index import Index
from tba_buffer.log import SCORED

VERSIONS_SHOWN = 50


def stored_stats(index: Index, tree: LineageTree, trainer: PolicyVersion) -> StoredStats:
    """The detail of what `index` holds. O(live rollouts): about 40 ms for a million.

    Args:
        tree, trainer: what policy age is measured along, and the last step of the living lineage.
    """
    versions = sorted(index.versions().items(), reverse=True)
    ages: dict[int, int] = {}
    for version, number in versions:
        age = tree.policy_age(version, trainer)
        ages[age] = ages.get(age, 0) + number
    rows = index.live_rows()
    rewards = index.column("reward", rows)[index.column("status", rows) == SCORED]
    return StoredStats(
        log_position=index.position,
        by_version={str(version): number for version, number in versions[:VERSIONS_SHOWN]},
        num_of_older_versions=sum(number for _, number in versions[VERSIONS_SHOWN:]),
        by_policy_age=_by_age(ages),
        policy_age_deciles=age_deciles(ages),
        by_length=by_length(index.column("num_tokens", rows)),
        reward_deciles=_reward_deciles(rewards),
    )


def age_bucket(age: int) -> str:
    """The bucket of a policy age: `0`, `1`, `2`, `3-4`, `5-8`, ..."""
    if age == 0:
        return "0"
    last = 1 << (age - 1).bit_length()
    return str(last) if last <= 2 else f"{last // 2 + 1}-{last}"


def age_deciles(ages: Mapping[int, int]) -> list[int] | None:
    """Eleven ages from the smallest to the largest, each one that occurs (nearest rank); None without any.

    Args:
        ages: age -> rollouts, at least one each.
    """
    if not ages:
        return None
    known = sorted(ages)
    up_to = np.cumsum([ages[age] for age in known])
    return [known[i] for i in np.searchsorted(up_to, _decile_ranks(int(up_to[-1])) + 1)]


def by_length(num_tokens: NDArray[np.integer]) -> dict[str, int]:
    """Bucket of the number of response tokens -> rollouts, shortest first. num_tokens: [N]."""
    per_length = np.bincount(num_tokens.astype(np.int64))
    buckets: dict[str, int] = {}
    for length in np.flatnonzero(per_length).tolist():
        bucket = length_bucket(length)
        buckets[bucket] = buckets.get(bucket, 0) + int(per_length[length])
    return buckets


def _reward_deciles(rewards: NDArray[np.float64]) -> list[float] | None:
    if not len(rewards):
        return None
    ranks, ordered, end = _decile_ranks(len(rewards)), rewards.copy(), len(rewards)
    for rank in np.unique(ranks)[::-1].tolist():  # one at a time: numpy takes ten times as long for several
        ordered[:end].partition(rank)
        end = rank + 1
    return ordered[ranks].tolist()


def _decile_ranks(num: int) -> NDArray[np.int64]:
    """Where in `num` sorted values the deciles are (nearest rank; whole numbers, so without rounding). [11]"""
    return np.maximum(0, -(-np.arange(NUM_DECILES) * num // (NUM_DECILES - 1)) - 1)


def _by_age(ages: Mapping[int, int]) -> dict[str, int]:
    buckets: dict[str, int] = {}
    for age in sorted(ages):
        buckets[age_bucket(age)] = buckets.get(age_bucket(age), 0) + ages[age]
    return buckets
