"""Which rollouts a batch holds: MOP per slot (arXiv 2503.18929, section 3; docs/algorithm.md).

A batch has `prompts_per_batch` slots. With probability m a slot draws from recent data, otherwise from everything:

    slot:    one prompt of its pool that this batch has not used yet
             (once the batch has used every prompt there is, all may be used again)
      within   uniform
      across   recent slots: uniform; replay slots: p = (1 - u) M / sum of all M + u / P,
               M = sum of exp(inverse_temperature * reward) over the prompt's rollouts
    recent:  K of the prompt's recent rollouts, uniformly
    replay:  K of all its rollouts, p = (1 - u) softmax(inverse_temperature * reward) + u / n
    K of n:  one after the other without replacement when n >= K, unless `replacement`;
             else with replacement (the distinct ones are counted)

A prompt belongs to a pool when it has at least `min_distinct` scored rollouts there: a group of one distinct rollout
teaches nothing. Where no prompt is left in the recent pool, the slot falls back to everything, and that is counted.
What is recent: `Index`, by arrival or by policy version.

A draw is a function of what the index holds, the settings and the seed: an index that was rebuilt draws the same. No
probability is rounded by more than float64 rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tba.config import Recipe
from tba_buffer.index import Index, Rows
from tba_buffer.log import SCORED
from tba_buffer.priorities import LOWEST, Priorities, gumbel, race, race_terms
from tba_buffer.prompt_choice import UniformChoice, WeightedChoice
from tba_buffer.prompt_set import PromptSet

_MAX_ROUNDS = 8
"""Independent draws, in multiples of K, before a slot weighs all its rollouts one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawSettings:
    """The settings of `[sampling]` that decide a draw."""

    prompts_per_batch: int
    group_size: int
    most_on_policy_prob: float = 0.0
    inverse_temperature: float = 0.0
    uniform_share: float = 0.0
    prioritise: Literal["within", "across"] = "within"
    replacement: bool = False
    min_distinct: int = 2

    @classmethod
    def of(cls, recipe: Recipe, *, step: int = 1) -> DrawSettings:
        """The settings of a run for the batch of optimizer step `step` (1 is the first)."""
        sampling = recipe.sampling
        return cls(
            prompts_per_batch=sampling.prompts_per_batch,
            group_size=sampling.group_size,
            most_on_policy_prob=sampling.most_on_policy_prob.at(step - 1),
            inverse_temperature=sampling.reward_inverse_temperature,
            uniform_share=sampling.uniform_share,
            prioritise=sampling.prioritise,
            replacement=sampling.replacement,
            min_distinct=sampling.min_distinct,
        )


class Slot(NamedTuple):
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
        return len(set(self.rows.tolist()))


def draw_slots(index: Index, settings: DrawSettings, seed: int) -> list[Slot]:
    """The slots of one batch; the same view and seed give the same batch.

    Raises:
        ValueError: no prompt can fill a slot.
    """
    rng = np.random.default_rng(seed)
    prompts, wanted, recent = _choose_prompts(index, settings, rng)
    rows = np.empty((len(prompts), settings.group_size), dtype=np.int64)
    num = np.where(recent, index.recent_counts[prompts], index.counts[prompts])
    few = num <= index.settings.big_prompt
    if few.any():
        rows[few] = _draw_from_few(index, settings, prompts[few], recent[few], rng)
    for prompt in np.unique(prompts[~few]).tolist():
        for part in (True, False):
            slots = np.flatnonzero(~few & (prompts == prompt) & (recent == part))
            if len(slots):
                rows[slots] = _draw_from_big(index, settings, prompt, part, len(slots), rng)
    return [
        Slot(prompt, "recent" if is_recent else "replay", wanted_recent, slot_rows)
        for prompt, is_recent, wanted_recent, slot_rows in zip(
            prompts.tolist(), recent.tolist(), wanted.tolist(), rows, strict=True
        )
    ]


def draw_rollouts(index: Index, settings: DrawSettings, num: int, seed: int) -> Rows:
    """`num` rollouts of all there are, whatever their prompt: p as in a replay slot, over everything. [num]

    Raises:
        ValueError: there is no scored rollout.
    """
    if not index.num_scored:
        raise ValueError("there is no scored rollout to draw")
    rng = np.random.default_rng(seed)
    tree, table = index.trees.of_all(settings.inverse_temperature), index.table
    draw, weigh = _replay_draws(tree, settings, rng)
    leaves = draw(num) if settings.replacement or tree.num < num else _distinct(draw, weigh, 1, num, rng)[0]
    first_slot = table.first % table.capacity
    return table.first + (leaves - first_slot) % table.capacity


def _choose_prompts(
    index: Index, settings: DrawSettings, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """For each slot: the prompt, whether recent data was wanted, whether it is recent data."""
    everything = _pool(index.drawable, index.counts, index, settings)
    if not everything.num:
        raise ValueError(f"no prompt has the {settings.min_distinct} scored rollouts that a slot needs")
    num_slots = settings.prompts_per_batch
    from_recent = UniformChoice(_pool(index.recent_drawable, index.recent_counts, index, settings), num_slots, rng)
    if settings.prioritise == "across":
        from_all = WeightedChoice(
            index.trees,
            index.counts,
            min_distinct=settings.min_distinct,
            inverse_temperature=settings.inverse_temperature,
            uniform_share=settings.uniform_share,
            num_slots=num_slots,
            rng=rng,
        )
    else:
        from_all = UniformChoice(everything, num_slots, rng)
    wanted = rng.random(num_slots) < settings.most_on_policy_prob
    used, prompts, recent = set[int](), [], []
    for wanted_recent in wanted.tolist():
        if len(used) == everything.num:
            used.clear()
            from_recent.restart()
            from_all.restart()
        prompt = from_recent.take(used) if wanted_recent else None
        recent.append(prompt is not None)
        if prompt is None:
            prompt = from_all.take(used)
        assert prompt is not None, "a prompt that is not used is left, or used was cleared"
        used.add(prompt)
        prompts.append(prompt)
    return np.array(prompts), wanted, np.array(recent)


def _pool(kept: PromptSet, counts: NDArray[np.int64], index: Index, settings: DrawSettings) -> PromptSet:
    """Prompts with at least min_distinct: the set that the index keeps, if it is for the same number."""
    if index.settings.min_distinct == settings.min_distinct:
        return kept
    pool = PromptSet()
    pool.grow(len(counts))
    pool.put_all(counts >= settings.min_distinct)
    return pool


def _draw_from_few(
    index: Index,
    settings: DrawSettings,
    prompts: NDArray[np.int64],
    recent: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Rows:
    """K rows for each slot, by looking at all rollouts of their prompts. [S, K]"""
    rows, owner = _candidates(index, prompts, recent)
    num_slots, size = len(prompts), settings.group_size
    num = np.bincount(owner, minlength=num_slots)
    rewards = index.table.get("reward", rows)
    ends = np.cumsum(num)
    filled = np.arange(num.max()) < num[:, None]
    repeat = np.full(num_slots, settings.replacement) | (num < size)
    chosen = np.empty((num_slots, size), dtype=np.int64)
    if not repeat.all():
        terms, noise = np.full(filled.shape, -np.inf), np.zeros(filled.shape)
        terms[filled], noise[filled] = _race_terms(rewards, num, recent, settings, rng)
        chosen[~repeat] = race(terms[~repeat], noise[~repeat], size)
    if repeat.any():
        p = np.zeros(filled.shape)
        p[filled] = np.exp(_log_probabilities(rewards, num, recent, settings))
        ends_p = np.cumsum(p[repeat], axis=1)
        targets = rng.random((len(ends_p), size)) * ends_p[:, -1:]
        at = np.count_nonzero(ends_p[:, None, :] <= targets[:, :, None], axis=2)
        chosen[repeat] = np.minimum(at, num[repeat, None] - 1)
    return rows[chosen + (ends - num)[:, None]]


def _candidates(index: Index, prompts: NDArray[np.int64], recent: NDArray[np.bool_]) -> tuple[Rows, NDArray[np.int64]]:
    """What each slot may draw, slot after slot, ascending within each; and the slot of each. [n], [n]"""
    blocks = index.blocks
    skip = np.zeros(len(prompts), dtype=np.int64)
    for at in np.flatnonzero(recent & (blocks.lengths[prompts] > index.settings.big_prompt)).tolist():
        skip[at] = np.searchsorted(blocks.rows(int(prompts[at])), index.first_recent())
    rows, lengths = blocks.rows_from(prompts, skip)
    owner = np.repeat(np.arange(len(prompts)), lengths)
    scored = index.table.status(rows) == SCORED
    rows, owner = rows[scored], owner[scored]
    if recent.any():
        chosen = ~recent[owner] | index.is_recent(rows)
        rows, owner = rows[chosen], owner[chosen]
    return rows, owner


def _race_terms(
    rewards: NDArray[np.float64],
    num: NDArray[np.int64],
    recent: NDArray[np.bool_],
    settings: DrawSettings,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For `priorities.race`, of each candidate: its term [n] and its noise [n]."""
    noise = gumbel(len(rewards), rng)
    if settings.inverse_temperature and not settings.uniform_share:
        terms, scale = race_terms(rewards, inverse_temperature=settings.inverse_temperature, uniform_share=0.0)
        is_recent = np.repeat(recent, num)
        return np.where(is_recent, 0.0, terms), np.where(is_recent, noise, scale * noise)
    return _log_probabilities(rewards, num, recent, settings), noise


def _log_probabilities(
    rewards: NDArray[np.float64], num: NDArray[np.int64], recent: NDArray[np.bool_], settings: DrawSettings
) -> NDArray[np.float64]:
    """log p of each candidate [n]; num [S] candidates lie together for each slot."""
    uniform = np.repeat(-np.log(num), num)
    share, inverse_temperature = settings.uniform_share, settings.inverse_temperature
    if not inverse_temperature or share >= 1 or recent.all():
        return uniform
    starts = np.cumsum(num) - num
    with np.errstate(over="ignore"):
        top = np.repeat(np.maximum.reduceat(rewards, starts), num)
        logits = np.maximum(inverse_temperature * (rewards - top), LOWEST)
    log_p = logits - np.repeat(np.log(np.add.reduceat(np.exp(logits), starts)), num)
    if share > 0:
        log_p = np.logaddexp(np.log1p(-share) + log_p, np.log(share) + uniform)
    return np.where(np.repeat(recent, num), uniform, log_p)


def _draw_from_big(
    index: Index, settings: DrawSettings, prompt: int, recent: bool, num_slots: int, rng: np.random.Generator
) -> Rows:
    """K rows for each of `num_slots` slots with the same prompt, by its tree. [S, K]"""
    tree = index.trees.of_prompt(prompt, settings.inverse_temperature)
    num = (index.recent_counts if recent else index.counts)[prompt]
    draw, weigh = _recent_draws(index, tree, prompt, rng) if recent else _replay_draws(tree, settings, rng)
    size = settings.group_size
    if settings.replacement or num < size:
        leaves = draw(num_slots * size).reshape(num_slots, size)
    else:
        leaves = _distinct(draw, weigh, num_slots, size, rng)
    return index.blocks.rows(prompt)[leaves]


Draw = Callable[[int], NDArray[np.int64]]
Weigh = Callable[[], tuple[NDArray[np.int64], NDArray[np.float64], float]]


def _distinct(draw: Draw, weigh: Weigh, num_slots: int, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`size` different leaves for each slot, drawn one after the other without replacement. [S, size]

    Args:
        draw: independent draws of leaves.
        weigh: all leaves as `Priorities.race_terms`, for when independent draws repeat themselves too often.
    """
    chosen = draw(num_slots * size).reshape(num_slots, size)
    in_order = np.sort(chosen, axis=1)
    repeats = np.flatnonzero((in_order[:, 1:] == in_order[:, :-1]).any(axis=1))
    if not len(repeats):
        return chosen
    kept = {slot: dict.fromkeys(chosen[slot].tolist()) for slot in repeats.tolist()}
    for _ in range(_MAX_ROUNDS):
        missing = [slot for slot, leaves in kept.items() if len(leaves) < size]
        if not missing:
            break
        for slot, more in zip(missing, draw(len(missing) * size).reshape(-1, size).tolist(), strict=True):
            kept[slot].update(dict.fromkeys(more))
    weighed = None
    for slot, leaves in kept.items():
        if len(leaves) < size:
            every, terms, scale = weighed = weighed or weigh()
            noise = scale * gumbel(len(every), rng)
            best = race(terms[None], noise[None], min(2 * size, len(every)))[0]
            leaves.update(dict.fromkeys(every[best].tolist()))
        chosen[slot] = _first(leaves, size)
    return chosen


def _first(leaves: Iterable[int], num: int) -> list[int]:
    return [leaf for _, leaf in zip(range(num), leaves, strict=False)]


def _replay_draws(tree: Priorities, settings: DrawSettings, rng: np.random.Generator) -> tuple[Draw, Weigh]:
    """Draws from all rollouts of a tree."""
    share = settings.uniform_share
    return (lambda num: tree.draw(num, share, rng)), (lambda: tree.race_terms(share))


def _recent_draws(index: Index, tree: Priorities, prompt: int, rng: np.random.Generator) -> tuple[Draw, Weigh]:
    """Uniform draws from the recent rollouts of a prompt that has many of them."""
    block = index.blocks.rows(prompt)
    first = tree.num_before(int(np.searchsorted(block, index.first_recent())))
    by_version = index.settings.recent_window == "version"

    def everything() -> NDArray[np.int64]:
        leaves = tree.by_rank(np.arange(first, tree.num))
        return leaves[index.is_recent(block[leaves])]

    def weigh() -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        leaves = everything()
        return leaves, np.zeros(len(leaves)), 1.0

    if by_version and 16 * index.recent_counts[prompt] < tree.num - first:
        recent = everything()
        return (lambda num: recent[rng.integers(0, len(recent), num)]), weigh

    def draw(num: int) -> NDArray[np.int64]:
        drawn = np.zeros(0, dtype=np.int64)
        while len(drawn) < num:
            leaves = tree.by_rank(rng.integers(first, tree.num, num))
            drawn = np.concatenate([drawn, leaves[index.is_recent(block[leaves])]])
        return drawn[:num]

    return draw, weigh
