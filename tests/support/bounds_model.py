"""A simple model of the eviction policies on plain lists; tests compare tba_buffer.eviction.policies with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tba.config.sections import BufferSection
from tba.versions import START, LineageTree, PolicyVersion


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One stored rollout; `tokens` stands for the hash of its tokens, 0 for no hash."""

    position: int
    rollout_id: bytes
    prompt: int
    status: str = "scored"
    reward: float | None = 1.0
    num_bytes: int = 100
    num_tokens: int = 3
    tokens: int = 0
    version: PolicyVersion = START

    def rescored(self, reward: float, num_bytes: int) -> Stored:
        """Return the same rollout with a known reward."""
        return replace(self, status="scored", reward=reward, num_bytes=num_bytes)


def plan(
    live: list[Stored], settings: BufferSection, tree: LineageTree, now: PolicyVersion | None
) -> list[tuple[str, list[Stored]]]:
    """Return (reason, rollouts to evict); `live` must be sorted by position and be shorter than EXACT_BELOW."""
    left = list(live)
    planned = []

    def take(reason: str, gone: list[Stored]) -> None:
        if gone:
            planned.append((reason, gone))
            for rollout in gone:
                left.remove(rollout)

    if settings.deduplicate:
        take("duplicate_tokens", [r for r in left if any(_replaces(other, r) for other in left)])
    limit = settings.max_policy_age_steps
    if limit is not None and now is not None:
        take("policy_age", [r for r in left if tree.policy_age(r.version, now) > limit])
    cap = settings.max_rollouts_per_prompt
    if cap is not None:
        prompts = {r.prompt: [other for other in left if other.prompt == r.prompt] for r in left}
        take("prompt_cap", [r for rollouts in prompts.values() for r in rollouts[: max(0, len(rollouts) - cap)]])
    take("max_rollouts", left[: max(0, len(left) - settings.max_rollouts)])
    too_much, gone = sum(r.num_bytes for r in left) - settings.max_bytes, []
    for rollout in left:
        if too_much > 0:
            gone.append(rollout)
            too_much -= rollout.num_bytes
    take("max_bytes", gone)
    return planned


def _replaces(newer: Stored, older: Stored) -> bool:
    return (
        newer.position > older.position
        and newer.prompt == older.prompt
        and newer.tokens == older.tokens
        and bool(newer.tokens)
    )
