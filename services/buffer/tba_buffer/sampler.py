"""Which rollouts a batch holds: MOP per slot (design.md, Semantics; algorithm.md, section 6). Pure functions.

A batch has `prompts_per_batch` slots. With probability m a slot draws from recent data, otherwise from everything:

    slot:    one prompt, uniform among those of its pool that this batch has not used yet
             (once the batch has used every prompt there is, all may be used again)
    recent:  K of the prompt's recent rollouts, uniformly
    replay:  K of all its rollouts, p = (1 - u) softmax(reward * inverse_temperature) + u / n
    K of n:  without replacement when n >= K, else with replacement (the distinct ones are counted)

A prompt belongs to a pool when it has at least MIN_DISTINCT rollouts there: a group of one distinct rollout teaches
nothing. Where no prompt is left in the recent pool, the slot falls back to everything, and that is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MIN_DISTINCT = 2
_LOWEST = -1e300
Rows = NDArray[np.int64]


class Pool(Protocol):
    """What the sampler reads: live scored rollouts by prompt."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """[P] rollouts of each prompt."""
        ...

    def rows(self, prompt: int) -> Rows:
        """Rows of one prompt, ascending."""
        ...

    def rewards(self, rows: Rows) -> NDArray[np.float64]:
        """Rewards of rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MopSettings:
    """The settings of `[sampling]` that decide a draw."""

    prompts_per_batch: int
    group_size: int
    most_on_policy_prob: float
    reward_inverse_temperature: float
    uniform_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one slot drew. `rows` has K entries; `wanted_recent` and `source` differ exactly on a fallback."""

    prompt: int
    source: str
    wanted_recent: bool
    rows: Rows

    @property
    def fallback(self) -> bool:
        """MOP wanted recent data and there was not enough."""
        return self.wanted_recent and self.source == "replay"

    @property
    def num_distinct(self) -> int:
        """Distinct rollouts among the K."""
        return len(np.unique(self.rows))


def drawable_prompts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of the prompts that can fill a slot, ascending."""
    return np.flatnonzero(counts >= MIN_DISTINCT)


def draw_slots(
    pool: Pool, recent_rows: Rows, recent_prompts: NDArray[np.int64], settings: MopSettings, seed: int
) -> list[Slot]:
    """The slots of one batch; the same view and seed give the same batch.

    Args:
        pool: everything.
        recent_rows: [N] rows that are recent, ascending.
        recent_prompts: [N] the prompt of each.

    Raises:
        ValueError: no prompt can fill a slot.
    """
    everything = drawable_prompts(pool.counts)
    if not len(everything):
        raise ValueError("no prompt has enough rollouts to fill a slot")
    order = np.argsort(recent_prompts, kind="stable")
    by_prompt, rows = recent_prompts[order], recent_rows[order]
    with_recent = drawable_prompts(np.bincount(by_prompt, minlength=len(pool.counts)))
    rng = np.random.default_rng(seed)
    unused, slots = np.ones(len(pool.counts), dtype=bool), []
    for wanted_recent in rng.random(settings.prompts_per_batch) < settings.most_on_policy_prob:
        if not unused[everything].any():
            unused[:] = True
        candidates = with_recent[unused[with_recent]] if wanted_recent else with_recent[:0]
        source = "recent" if len(candidates) else "replay"
        prompt = int(rng.choice(candidates if len(candidates) else everything[unused[everything]]))
        unused[prompt] = False
        if source == "recent":
            start, end = np.searchsorted(by_prompt, [prompt, prompt + 1])
            chosen = rng.choice(rows[start:end], settings.group_size, replace=end - start < settings.group_size)
        else:
            chosen = _by_reward(pool, prompt, settings, rng)
        slots.append(Slot(prompt=prompt, source=source, wanted_recent=bool(wanted_recent), rows=chosen))
    return slots


def log_probabilities(
    rewards: NDArray[np.float64], *, inverse_temperature: float, uniform_share: float
) -> NDArray[np.float64]:
    """log of (1 - u) softmax(reward * inverse_temperature) + u / n, finite for any finite rewards. [n] -> [n]"""
    num = len(rewards)
    uniform = np.full(num, -np.log(num))
    if inverse_temperature == 0 or uniform_share == 1:
        return uniform
    with np.errstate(over="ignore"):
        logits = np.maximum(inverse_temperature * (rewards - rewards.max()), _LOWEST)
    softmax = logits - np.log(np.exp(logits).sum())
    if uniform_share == 0:
        return softmax
    return np.logaddexp(np.log1p(-uniform_share) + softmax, np.log(uniform_share) + uniform)


def _by_reward(pool: Pool, prompt: int, settings: MopSettings, rng: np.random.Generator) -> Rows:
    rows, size = pool.rows(prompt), settings.group_size
    log_p = log_probabilities(
        pool.rewards(rows),
        inverse_temperature=settings.reward_inverse_temperature,
        uniform_share=settings.uniform_share,
    )
    if len(rows) < size:
        return rng.choice(rows, size, replace=True, p=np.exp(log_p))
    # Gumbel-top-k: the same distribution as drawing one after the other without replacement, and no underflow
    keys = log_p + rng.gumbel(size=len(rows))
    return rows[np.argsort(-keys, kind="stable")[:size]]
