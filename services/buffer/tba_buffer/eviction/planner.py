"""The plan of an eviction: the policies of a recipe, asked one after the other. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tba.config import Recipe
from tba.versions import LineageTree, PolicyVersion
from tba_buffer.eviction.custom import load_policies
from tba_buffer.eviction.policies import (
    NO_ROWS,
    DuplicateTokens,
    EvictionOrder,
    EvictionPlan,
    EvictionPolicy,
    MaxBytes,
    MaxRollouts,
    NearDuplicate,
    PolicyAge,
    PromptCap,
)
from tba_buffer.index.rollout_index import Index, Rows


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """The limits and policies of a recipe's `[buffer]` section."""

    max_rollouts: int
    max_bytes: int
    max_rollouts_per_prompt: int | None = None
    max_policy_age_steps: int | None = None
    evict: Literal["oldest", "lowest_reward"] = "oldest"
    deduplicate: bool = False
    eviction_policies: Sequence[str] = ()

    @classmethod
    def of(cls, recipe: Recipe) -> EvictionSettings:
        """Return the limits that a recipe asks for."""
        return cls(**{name: getattr(recipe.buffer, name) for name in cls.__slots__})


def make_policies(settings: EvictionSettings) -> list[EvictionPolicy]:
    """Return the policies of a recipe in their order: a rollout goes for the first reason that applies to it.

    Raises:
        ConfigError: a policy from outside cannot be used.
    """
    order = EvictionOrder(settings.evict)
    policies: list[EvictionPolicy] = []
    if settings.deduplicate:
        policies.append(DuplicateTokens())
    policies.append(NearDuplicate())
    if settings.max_policy_age_steps is not None:
        policies.append(PolicyAge(settings.max_policy_age_steps))
    if settings.max_rollouts_per_prompt is not None:
        policies.append(PromptCap(settings.max_rollouts_per_prompt, order))
    # the global caps are last: they count what the other policies have left
    caps = [MaxRollouts(settings.max_rollouts, order), MaxBytes(settings.max_bytes, order)]
    return [*policies, *load_policies(settings.eviction_policies), *caps]


class EvictionPlanner:
    """Plans evictions. The policies remember what they have seen, so a plan costs what is new and what goes.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: EvictionSettings) -> None:
        self._settings = settings
        self._index: Index | None = None
        self._policies = make_policies(settings)
        self._seen_position = 0

    @property
    def needs_new_rows(self) -> bool:
        """Whether a push that fits under both global caps may still make something go."""
        return any(policy.needs_new_rows for policy in self._policies)

    def is_due(self, now: PolicyVersion) -> bool:
        """Return whether a trainer at `now` can make something go that an earlier plan has kept."""
        return any(policy.is_due(now) for policy in self._policies)

    def plan(
        self, index: Index, tree: LineageTree, now: PolicyVersion | None, near_duplicates: Rows = NO_ROWS
    ) -> list[tuple[str, Rows]]:
        """Return (reason, rows) of everything that must go, in the order of the policies; empty when nothing must.

        Args:
            index: level with the log.
            tree: every lineage that made rollouts.
            now: where the trainer stands; None when that is not known, and no age is looked at.
            near_duplicates: rows that are near duplicates of better ones.
        """
        new_rows = self._new_rows(index)
        plan = EvictionPlan(index, new_rows=new_rows, tree=tree, now=now, near_duplicates=near_duplicates)
        for policy in self._policies:
            plan.drop(policy.reason, policy.choose(plan))
        return plan.chosen

    def _new_rows(self, index: Index) -> Rows:
        """Return the live rows that no plan has seen."""
        if index is not self._index:  # a rebuilt index gives positions to other rollouts: nothing seen holds any more
            self._index, self._seen_position = index, 0
            self._policies = make_policies(self._settings)
        if not self.needs_new_rows:
            return NO_ROWS
        rows = index.live_rows(newest=min(index.num_live, index.position - self._seen_position))
        new = rows[index.column("position", rows) > self._seen_position]
        self._seen_position = index.position
        return new
