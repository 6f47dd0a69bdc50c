"""MOP, Most-On-Policy sampling: which rollouts a batch holds (arXiv 2503.18929, section 3; docs/algorithm.md).

A batch has `prompts_per_batch` slots. With probability m (`most_on_policy_prob`) a slot draws from recent data, else
from everything:

    slot:    one prompt of its pool that this batch has not used yet
             (once the batch has used every prompt there is, all may be used again)
      within   uniform
      across   recent slots: uniform; replay slots: p = (1 - u) M / sum of all M + u / P,
               M = sum of exp(inverse_temperature * reward) over the prompt's rollouts
    recent:  K of the prompt's recent rollouts, uniformly
    replay:  K of all its rollouts, p = (1 - u) softmax(inverse_temperature * reward) + u / n
    K of n:  one after the other without replacement when n >= K, unless `replacement`;
             else with replacement (the distinct ones are counted)

`Index` says what is recent, by arrival or by policy version. A draw is a function of what the index holds, the settings
and the seed: an index that was rebuilt draws the same. No probability is rounded by more than float64 rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tba.config import Recipe
from tba_buffer.index.log import SCORED
from tba_buffer.index.priorities import (
    LOWEST,
    MAX_EXCESS,
    Priorities,
    RewardTrees,
    gumbel_noise,
    gumbel_terms,
    gumbel_top_k,
)
from tba_buffer.index.rollout_index import Index, Rows
from tba_buffer.index.tables import PromptSet

_MAX_ROUNDS = 8
"""Rounds of independent draws before all prompts, or all rollouts of a slot, are weighed one by one."""


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
        """Return the settings of a run for the batch of optimizer step `step` (1 is the first)."""
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
    """One drawn slot. `rows` has K entries; `wanted_recent` and `source` differ exactly on a fallback."""

    prompt: int
    source: str
    wanted_recent: bool
    rows: Rows

    @property
    def fallback(self) -> bool:
        """Whether the coin asked for recent data and there was not enough."""
        return self.wanted_recent and self.source == "replay"

    @property
    def num_distinct(self) -> int:
        """Distinct rollouts among the K."""
        return len(set(self.rows.tolist()))


def draw_slots(index: Index, settings: DrawSettings, seed: int) -> list[Slot]:
    """Draw the slots of one batch; the same index and seed give the same batch.

    Raises:
        ValueError: no prompt can fill a slot.
    """
    rng = np.random.default_rng(seed)
    prompts, wanted, recent = _choose_prompts(index, settings, rng)
    rows = np.empty((len(prompts), settings.group_size), dtype=np.int64)
    num = np.where(recent, index.recent_counts[prompts], index.counts[prompts])
    # few rollouts: weigh them all at once for all slots; many: draw from the tree of their prompt
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


def _choose_prompts(
    index: Index, settings: DrawSettings, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Flip the coin of every slot, and choose its prompt.

    Returns:
        For each slot: the prompt, whether the coin asked for recent data, whether the slot gets recent data.
    """
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
    # MOP's coin: with probability m a slot wants the most on-policy data there is
    wanted = rng.random(num_slots) < settings.most_on_policy_prob
    used, prompts, recent = set[int](), [], []
    for wanted_recent in wanted.tolist():
        # more slots than prompts: the batch begins to use them again
        if len(used) == everything.num:
            used.clear()
            from_recent.restart()
            from_all.restart()
        prompt = from_recent.take(used) if wanted_recent else None
        recent.append(prompt is not None)  # no prompt left in the recent pool: the slot falls back to everything
        if prompt is None:
            prompt = from_all.take(used)
        assert prompt is not None, "a prompt that is not used is left, or used was cleared"
        used.add(prompt)
        prompts.append(prompt)
    return np.array(prompts), wanted, np.array(recent)


def _pool(kept: PromptSet, counts: NDArray[np.int64], index: Index, settings: DrawSettings) -> PromptSet:
    """Return the prompts with at least `min_distinct` scored rollouts: a group of one distinct rollout teaches nothing.

    This is the set that the index keeps, if it keeps it for the same number.
    """
    if index.settings.min_distinct == settings.min_distinct:
        return kept
    pool = PromptSet()
    pool.grow(len(counts))
    pool.put_all(counts >= settings.min_distinct)
    return pool


class UniformChoice:
    """Chooses prompts of a set uniformly, each new to the batch while there are new ones.

    The choice is the next prompt of a random sequence that the batch has not used yet. For few prompts the sequence is
    a random order of all of them, for many it is independent draws. Either way the next unused one is uniform among the
    unused.

    Args:
        prompts: the set to choose from.
        num_slots: how many choices to expect.
        rng: the generator of the batch.
    """

    def __init__(self, prompts: PromptSet, num_slots: int, rng: np.random.Generator) -> None:
        self._prompts = prompts
        self._num_slots = num_slots
        self._rng = rng
        self._few = prompts.by_rank(np.arange(prompts.num)) if prompts.num <= 2 * num_slots else None
        self.restart()

    def restart(self) -> None:
        """Begin again: the batch has used every prompt, and all may be used again."""
        self._sequence = self._draw()

    def _draw(self) -> Iterator[int]:
        if self._few is not None:
            yield from (self._few[self._rng.permutation(len(self._few))] if len(self._few) > 1 else self._few).tolist()
            return
        while True:  # a batch can use at most half of them, so this finds unused ones soon
            ranks = self._rng.integers(0, self._prompts.num, self._num_slots + 8)
            yield from self._prompts.by_rank(ranks).tolist()

    def take(self, used: set[int]) -> int | None:
        """Return the next prompt that is not used; None when all are."""
        for prompt in self._sequence:
            if prompt not in used:
                return prompt
        return None


class WeightedChoice:
    """Chooses prompts by the total weight of their rollouts, mixed with a uniform share, as `UniformChoice` does.

    The next unused prompt has the probability of drawing without replacement.

    Args:
        trees, counts: from the index.
        min_distinct, inverse_temperature, uniform_share, num_slots: the settings of the draw.
        rng: the generator of the batch.
    """

    def __init__(
        self,
        trees: RewardTrees,
        counts: NDArray[np.int64],
        *,
        min_distinct: int,
        inverse_temperature: float,
        uniform_share: float,
        num_slots: int,
        rng: np.random.Generator,
    ) -> None:
        self._trees = trees
        self._counts = counts
        self._inverse_temperature = inverse_temperature
        self._uniform_share = uniform_share
        self._num_slots = num_slots
        self._rng = rng
        self._prompts = trees.of_prompts(counts, min_distinct, inverse_temperature)
        self._only = int(self._prompts.by_rank(np.zeros(1, dtype=np.int64))[0]) if self._prompts.num == 1 else None
        self.restart()

    def restart(self) -> None:
        """Begin again: the batch has used every prompt, and all may be used again."""
        self._sequence = self._draw()

    def take(self, used: set[int]) -> int | None:
        """Return the next prompt that is not used; None when all are."""
        for prompt in self._sequence:
            if prompt not in used:
                return prompt
        return None

    def _draw(self) -> Iterator[int]:
        if self._only is not None:
            yield self._only
            return
        for _ in range(_MAX_ROUNDS):
            yield from self._prompts.draw(self._num_slots + 8, self._uniform_share, self._rng, self._keeps).tolist()
        # a few prompts have nearly all the weight: order all prompts at once, which is the same distribution
        prompts, terms, scale = self._prompts.gumbel_terms(self._uniform_share, self._exact_values)
        noise = scale * gumbel_noise(len(prompts), self._rng)
        yield from prompts[gumbel_top_k(terms[None], noise[None], len(prompts))[0]].tolist()

    def _keeps(self, prompts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which drawn prompts to keep: a big one is drawn by an upper bound of its weight, and kept with
        probability weight / bound."""
        num = np.where(self._counts[prompts] > self._trees.big_prompt, self._counts[prompts], 0)
        fate = self._rng.random(len(prompts))
        kept = fate >= num * MAX_EXCESS
        for at in np.flatnonzero(~kept).tolist():
            tree = self._trees.of_prompt(int(prompts[at]), self._inverse_temperature)
            kept[at] = fate[at] >= -np.expm1(tree.log_mass() - tree.log_mass_bound)
        return kept

    def _exact_values(self, prompts: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
        values = values.copy()
        for at in np.flatnonzero(self._counts[prompts] > self._trees.big_prompt).tolist():
            values[at] = self._trees.of_prompt(int(prompts[at]), self._inverse_temperature).log_mass()
        return values


def _draw_from_few(
    index: Index,
    settings: DrawSettings,
    prompts: NDArray[np.int64],
    recent: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Rows:
    """Draw K rows for each slot by looking at all rollouts of its prompt. [S, K]"""
    rows, owner = _candidates(index, prompts, recent)
    num_slots, size = len(prompts), settings.group_size
    num = np.bincount(owner, minlength=num_slots)
    rewards = index.columns.get("reward", rows)
    ends = np.cumsum(num)
    filled = np.arange(num.max()) < num[:, None]
    # fewer than K rollouts can only be drawn with replacement
    repeat = np.full(num_slots, settings.replacement) | (num < size)
    chosen = np.empty((num_slots, size), dtype=np.int64)
    if not repeat.all():
        terms, noise = np.full(filled.shape, -np.inf), np.zeros(filled.shape)
        terms[filled], noise[filled] = _gumbel_terms(rewards, num, recent, settings, rng)
        chosen[~repeat] = gumbel_top_k(terms[~repeat], noise[~repeat], size)
    if repeat.any():
        p = np.zeros(filled.shape)
        p[filled] = np.exp(_log_probabilities(rewards, num, recent, settings))
        ends_p = np.cumsum(p[repeat], axis=1)
        # inverse transform sampling, one row of cumulative weights per slot
        targets = rng.random((len(ends_p), size)) * ends_p[:, -1:]
        at = np.count_nonzero(ends_p[:, None, :] <= targets[:, :, None], axis=2)
        chosen[repeat] = np.minimum(at, num[repeat, None] - 1)
    return rows[chosen + (ends - num)[:, None]]


def _candidates(index: Index, prompts: NDArray[np.int64], recent: NDArray[np.bool_]) -> tuple[Rows, NDArray[np.int64]]:
    """Return the rows that each slot may draw, slot after slot and ascending, and the slot of each row. [n], [n]"""
    blocks = index.rows_by_prompt
    skip = np.zeros(len(prompts), dtype=np.int64)
    for at in np.flatnonzero(recent & (blocks.lengths[prompts] > index.settings.big_prompt)).tolist():
        # recent rows are the last ones: of a big prompt leave out everything before them
        skip[at] = np.searchsorted(blocks.rows(int(prompts[at])), index.first_recent())
    rows, lengths = blocks.rows_from(prompts, skip)
    owner = np.repeat(np.arange(len(prompts)), lengths)
    scored = index.columns.status(rows) == SCORED
    rows, owner = rows[scored], owner[scored]
    if recent.any():
        chosen = ~recent[owner] | index.is_recent(rows)
        rows, owner = rows[chosen], owner[chosen]
    return rows, owner


def _gumbel_terms(
    rewards: NDArray[np.float64],
    num: NDArray[np.int64],
    recent: NDArray[np.bool_],
    settings: DrawSettings,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the term [n] and the noise [n] of each candidate, for `priorities.gumbel_top_k`."""
    noise = gumbel_noise(len(rewards), rng)
    if settings.inverse_temperature and not settings.uniform_share:
        terms, scale = gumbel_terms(rewards, inverse_temperature=settings.inverse_temperature, uniform_share=0.0)
        is_recent = np.repeat(recent, num)
        # recent slots are uniform: equal terms, and noise alone decides
        return np.where(is_recent, 0.0, terms), np.where(is_recent, noise, scale * noise)
    return _log_probabilities(rewards, num, recent, settings), noise


def _log_probabilities(
    rewards: NDArray[np.float64], num: NDArray[np.int64], recent: NDArray[np.bool_], settings: DrawSettings
) -> NDArray[np.float64]:
    """Return log p of each candidate [n]; the num [S] candidates of a slot lie together."""
    uniform = np.repeat(-np.log(num), num)
    share, inverse_temperature = settings.uniform_share, settings.inverse_temperature
    if not inverse_temperature or share >= 1 or recent.all():
        return uniform
    starts = np.cumsum(num) - num
    with np.errstate(over="ignore"):
        # minus the largest of the slot, so that exp does not overflow
        top = np.repeat(np.maximum.reduceat(rewards, starts), num)
        logits = np.maximum(inverse_temperature * (rewards - top), LOWEST)
    log_p = logits - np.repeat(np.log(np.add.reduceat(np.exp(logits), starts)), num)
    if share > 0:
        # (1 - u) softmax + u / n, in logs
        log_p = np.logaddexp(np.log1p(-share) + log_p, np.log(share) + uniform)
    return np.where(np.repeat(recent, num), uniform, log_p)


def _draw_from_big(
    index: Index, settings: DrawSettings, prompt: int, recent: bool, num_slots: int, rng: np.random.Generator
) -> Rows:
    """Draw K rows for each of `num_slots` slots with the same prompt by its tree. [S, K]"""
    tree = index.trees.of_prompt(prompt, settings.inverse_temperature)
    num = (index.recent_counts if recent else index.counts)[prompt]
    draw, weigh = _recent_draws(index, tree, prompt, rng) if recent else _replay_draws(tree, settings, rng)
    size = settings.group_size
    if settings.replacement or num < size:
        leaves = draw(num_slots * size).reshape(num_slots, size)
    else:
        leaves = _distinct(draw, weigh, num_slots, size, rng)
    return index.rows_by_prompt.rows(prompt)[leaves]


Draw = Callable[[int], NDArray[np.int64]]
Weigh = Callable[[], tuple[NDArray[np.int64], NDArray[np.float64], float]]


def _distinct(draw: Draw, weigh: Weigh, num_slots: int, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `size` different leaves for each slot, one after the other without replacement. [S, size]

    Args:
        draw: independent draws of leaves.
        weigh: returns all leaves as `Priorities.gumbel_terms`; used when independent draws repeat themselves too often.
    """
    chosen = draw(num_slots * size).reshape(num_slots, size)
    in_order = np.sort(chosen, axis=1)
    repeats = np.flatnonzero((in_order[:, 1:] == in_order[:, :-1]).any(axis=1))
    if not len(repeats):
        return chosen
    # the first K distinct ones of independent draws are draws one after the other without replacement
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
            noise = scale * gumbel_noise(len(every), rng)
            # 2 K, since up to K of them are drawn already
            best = gumbel_top_k(terms[None], noise[None], min(2 * size, len(every)))[0]
            leaves.update(dict.fromkeys(every[best].tolist()))
        chosen[slot] = _first(leaves, size)
    return chosen


def _first(leaves: Iterable[int], num: int) -> list[int]:
    return [leaf for _, leaf in zip(range(num), leaves, strict=False)]


def _replay_draws(tree: Priorities, settings: DrawSettings, rng: np.random.Generator) -> tuple[Draw, Weigh]:
    """Return the functions that draw from all rollouts of a tree."""
    share = settings.uniform_share
    return (lambda num: tree.draw(num, share, rng)), (lambda: tree.gumbel_terms(share))


def _recent_draws(index: Index, tree: Priorities, prompt: int, rng: np.random.Generator) -> tuple[Draw, Weigh]:
    """Return the functions that draw uniformly from the recent rollouts of a prompt that has many of them."""
    block = index.rows_by_prompt.rows(prompt)
    first = tree.num_before(int(np.searchsorted(block, index.first_recent())))
    by_version = index.settings.recent_window == "version"

    def everything() -> NDArray[np.int64]:
        leaves = tree.by_rank(np.arange(first, tree.num))
        return leaves[index.is_recent(block[leaves])]

    def weigh() -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        leaves = everything()
        return leaves, np.zeros(len(leaves)), 1.0

    # by version the recent rows may lie thinly among the rest, and rejection would draw many times for each
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


def draw_rollouts(index: Index, settings: DrawSettings, num: int, seed: int) -> Rows:
    """Draw `num` rollouts of all there are, whatever their prompt: p as in a replay slot, over everything. [num]

    Raises:
        ValueError: there is no scored rollout.
    """
    if not index.num_scored:
        raise ValueError("there is no scored rollout to draw")
    rng = np.random.default_rng(seed)
    tree, table = index.trees.of_all(settings.inverse_temperature), index.columns
    draw, weigh = _replay_draws(tree, settings, rng)
    # with fewer than `num` rollouts, with replacement
    leaves = draw(num) if settings.replacement or tree.num < num else _distinct(draw, weigh, 1, num, rng)[0]
    # leaves are slots of the ring that holds the columns
    first_slot = table.first % table.capacity
    return table.first + (leaves - first_slot) % table.capacity
