"""Builders of log events and of indexes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tba_buffer.index.log import CHANGE_DTYPE, RECORD_DTYPE, STATUS_CODES, Event, Evicted, Rescored, RolloutsAdded
from tba_buffer.index.rollout_index import Index, IndexSettings

from tba.config.sections import SamplingSection
from tba.versions import START, PolicyVersion


@dataclass(frozen=True, kw_only=True)
class Item:
    """The fields of one rollout's record; `reward` counts only with the status `scored`."""

    prompt: int = 0
    reward: float = 0.0
    status: str = "scored"
    version: PolicyVersion = START
    num_bytes: int = 10


def make_added(first_position: int, items: Sequence[Item]) -> RolloutsAdded:
    """Return the event of a push; the ids of its rollouts follow from their positions (`rollout_id_at`)."""
    records = np.zeros(len(items), dtype=RECORD_DTYPE)
    for number, item in enumerate(items):
        position = first_position + number
        records[number] = (
            rollout_id_at(position),
            item.reward if item.status == "scored" else float("nan"),
            item.version.lineage,
            item.version.step,
            item.prompt,
            item.num_bytes,
            5,
            position * 31,
            STATUS_CODES[item.status],
        )
    return RolloutsAdded(first_position, records)


def rollout_id_at(position: int) -> bytes:
    """Return the id that `make_added` gives to the rollout at a position."""
    return hashlib.md5(str(position).encode(), usedforsecurity=False).digest()


def make_evicted(position: int, positions: Sequence[int], reason: str = "max_rollouts") -> Evicted:
    return Evicted(position, np.array(positions, dtype="<u8"), reason)


def make_rescored(position: int, items: dict[int, Item]) -> Rescored:
    """Return the event that gives rollouts new rewards, sizes and statuses; `items` has them by log position."""
    changes = np.zeros(len(items), dtype=CHANGE_DTYPE)
    for number, (at, item) in enumerate(items.items()):
        reward = item.reward if item.status == "scored" else float("nan")
        changes[number] = (at, reward, item.num_bytes, STATUS_CODES[item.status])
    return Rescored(position, changes)


def make_index(*events: Event, **settings: Any) -> Index:
    """Return an index to which these events were applied."""
    index = Index(IndexSettings(**settings))
    for event in events:
        index.apply(event)
    return index


def make_sampling(*, inverse_temperature: float = 0.0, **changes: Any) -> SamplingSection:
    """Return sampling settings: by default one slot of two rollouts, drawn from all rollouts."""
    plain = {"prompts_per_batch": 1, "group_size": 2, "most_on_policy_prob": 0.0}
    return SamplingSection(reward_inverse_temperature=inverse_temperature, **{**plain, **changes})


def index_of(rewards: Sequence[Sequence[float]], **settings: Any) -> Index:
    """Return an index in which prompt p has one rollout per reward in rewards[p], added prompt by prompt."""
    items = [Item(prompt=prompt, reward=reward) for prompt, group in enumerate(rewards) for reward in group]
    return make_index(make_added(1, items), **settings)


def fingerprint(index: Index) -> tuple[object, ...]:
    """Return the whole state of an index, to compare two indexes that read the same log."""
    state = index.checkpoint()
    prompts = np.flatnonzero(index.live_counts).tolist()
    return (
        state.position,
        state.publications,
        state.records.tobytes(),
        (index._num_of.tolist(), index.payload_bytes, index.num_used_up),
        ([pool.num for pool in (*index.drawable, *index.due)], state.draws),
        [index._per_prompt[:, prompt].tolist() for prompt in prompts],
        [index.columns.get("position", index.prompt_rows(prompt)).tolist() for prompt in prompts],
        index.columns.get("position", index.recent_rows()).tolist(),
        index.versions(),
    )
