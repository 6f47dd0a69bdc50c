"""MOP, Most-On-Policy sampling: which rollouts a batch holds (arXiv 2503.18929, section 3; docs/algorithm.md).

A batch has `prompts_per_batch` slots. With probability m (`most_on_policy_prob`) a slot draws from recent data, else
from everything:

    slot:    one prompt of its pool that this batch has not used yet
             (once the batch has used every prompt there is, all may be used again)
      within   uniform among those of the pool with the fewest turns, so all are used before one is used again, across
               batches; recent and replay slots count turns separately (index/draws.py)
      across   recent slots: the same; replay slots: p = (1 - u) M / sum of all M + u / P,
               M = sum of w over the prompt's rollouts; they take no turns
    m = 1    recent data alone, whose prompts are used again, unless `recent_shortage` is "draw" or there is none
    w        exp(inverse_temperature * reward)
    recent:  K of the prompt's recent rollouts, uniformly
    replay:  K of all its rollouts, p = (1 - u) w / sum of all w + u / n
    K of n:  one after the other without replacement when n >= K;
             else with replacement (the distinct ones are counted)

Rollouts that were in `max_uses` batches are in no pool. `Index` says what is recent, and what was drawn before. A draw
is a function of the content of the index, the settings and the seed: a rebuilt index draws the same. Probabilities are
exact up to float64 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tba.config.sections import SamplingSection
from tba.versions import PolicyVersion
from tba.wire.batch import Source
from tba_buffer.index.draws import RECENT, REPLAY
from tba_buffer.index.log import SLOT_DTYPE, Drawn
from tba_buffer.index.priorities import LOWEST, gumbel_noise, gumbel_terms, gumbel_top_k
from tba_buffer.index.rollout_index import Index, Rows
from tba_buffer.sampling.prompt_choice import TurnChoice, WeightedChoice

_MAX_ROUNDS = 8
"""Rounds of independent draws before all rollouts of a slot are weighed one by one."""


class Slot(NamedTuple):
    """One drawn slot with K `rows`. `wanted_recent`: the coin asked for recent data; `source`: the pool drawn from."""

    prompt: int
    source: Source
    wanted_recent: bool
    rows: Rows
    turn: int = 0
    """Which turn of its prompt this is; 0: it takes none."""
    floor: int = 0
    """The fewest turns in its pool when the batch was drawn."""

    @property
    def fallback(self) -> bool:
        """Whether the coin asked for recent data and there was not enough."""
        return self.wanted_recent and self.source == "replay"


def draw_slots(index: Index, settings: SamplingSection, seed: int) -> list[Slot]:
    """Draw the slots of one batch; the same index and seed give the same batch.

    Raises:
        ValueError: no prompt can fill a slot.
    """
    rng = np.random.default_rng(seed)
    choice = _SlotChoice(index, settings, rng)
    # MOP's coin: with probability m a slot wants the most on-policy data there is
    wanted = rng.random(settings.prompts_per_batch) < settings.most_on_policy_prob
    chosen = [choice.choose(wanted_recent) for wanted_recent in wanted.tolist()]
    prompts = np.array([each.prompt for each in chosen])
    recent = np.array([each.is_recent for each in chosen])
    rows = np.empty((len(prompts), settings.group_size), dtype=np.int64)
    num = np.where(recent, index.recent_counts[prompts], index.drawable_counts[prompts])
    # few rollouts: weigh them all at once for all slots; many: draw from the tree of their prompt
    few = num <= index.settings.big_prompt
    if few.any():
        rows[few] = _draw_from_few(index, settings, prompts[few], recent[few], rng)
    for prompt in np.unique(prompts[~few]).tolist():
        for part in (True, False):
            slots = np.flatnonzero(~few & (prompts == prompt) & (recent == part))
            if len(slots):
                rows[slots] = _draw_from_big(index, settings, prompt, part, len(slots), rng)
    turns, floors = choice.turns_taken(recent.tolist()), choice.floors
    return [
        Slot(
            prompt=each.prompt,
            source="recent" if each.is_recent else "replay",
            wanted_recent=each.wanted_recent,
            rows=rows[at],
            turn=turns[at],
            floor=floors[each.is_recent],
        )
        for at, each in enumerate(chosen)
    ]


def drawn_event(index: Index, slots: Sequence[Slot], batch_id: str, version: PolicyVersion) -> Drawn:
    """Return the log event, at the position after the index's, of a batch of these slots for step `version`."""
    packed = [(each.prompt, each.source == "recent", each.turn, each.floor) for each in slots]
    rows = np.unique(np.concatenate([each.rows for each in slots]))
    positions = index.column("position", rows)
    return Drawn(index.position + 1, batch_id, version, np.array(packed, dtype=SLOT_DTYPE), positions)


class _Chosen(NamedTuple):
    """The prompt of a slot. `is_recent` is False if `wanted_recent` is, or the recent pool had no unused prompt."""

    prompt: int
    is_recent: bool
    wanted_recent: bool


class _SlotChoice:
    """Chooses the prompts of a batch's slots.

    Raises:
        ValueError: no prompt can fill a slot.
    """

    def __init__(self, index: Index, settings: SamplingSection, rng: np.random.Generator) -> None:
        if not index.num_drawable:
            raise ValueError(
                f"no prompt has {index.settings.min_distinct} scored rollouts that may be drawn, as a slot needs"
            )
        num_slots = settings.prompts_per_batch
        is_recent_alone = settings.waits_for_recent and index.drawable[RECENT].num > 0
        self._num_prompts = index.drawable[RECENT].num if is_recent_alone else index.num_drawable
        self._from_recent = TurnChoice(index, RECENT, num_slots, rng)
        self._from_all: TurnChoice | WeightedChoice
        if settings.prioritise == "across":
            self._from_all = WeightedChoice(
                index.trees,
                index.drawable_counts,
                min_distinct=index.settings.min_distinct,
                inverse_temperature=settings.reward_inverse_temperature,
                uniform_share=settings.uniform_share,
                num_slots=num_slots,
                rng=rng,
            )
        else:
            self._from_all = TurnChoice(index, REPLAY, num_slots, rng)
        self._used = set[int]()
        self.floors = (self._from_all.floor, self._from_recent.floor)
        """Floors of the pools, by number: REPLAY, RECENT."""

    def choose(self, wanted_recent: bool) -> _Chosen:
        """Choose the prompt of the next slot."""
        # more slots than prompts: the batch begins to use them again
        if len(self._used) == self._num_prompts:
            self._used.clear()
            self._from_recent.restart()
            self._from_all.restart()
        prompt = self._from_recent.take(self._used) if wanted_recent else None
        is_recent = prompt is not None  # no prompt left in the recent pool: the slot falls back to everything
        if prompt is None:
            prompt = self._from_all.take(self._used)
        assert prompt is not None, "a prompt that is not used is left, or used was cleared"
        self._used.add(prompt)
        return _Chosen(prompt, is_recent, wanted_recent)

    def turns_taken(self, is_recent: Sequence[bool]) -> list[int]:
        """Return which turn of its prompt each choice took, in order; `is_recent` says which pool each came from."""
        recent, replay = iter(self._from_recent.turns_taken()), iter(self._from_all.turns_taken())
        return [next(recent if each else replay) for each in is_recent]


def _draw_from_few(
    index: Index,
    settings: SamplingSection,
    prompts: NDArray[np.int64],
    recent: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Rows:
    """Draw K rows for each slot by looking at all rollouts of its prompt. [S, K]"""
    # the rows that each slot may draw, slot after slot and ascending, and the slot of each row: [n], [n]
    blocks, num_slots, size = index.rows_by_prompt, len(prompts), settings.group_size
    skip = np.zeros(num_slots, dtype=np.int64)
    for at in np.flatnonzero(recent & (blocks.lengths[prompts] > index.settings.big_prompt)).tolist():
        # recent rows are the last ones: of a big prompt leave out everything before them
        skip[at] = np.searchsorted(blocks.rows(int(prompts[at])), index.first_recent())
    rows, lengths = blocks.rows_from(prompts, skip)
    owner = np.repeat(np.arange(num_slots), lengths)
    drawable = index.is_drawable(rows)
    rows, owner = rows[drawable], owner[drawable]
    if recent.any():
        wanted = ~recent[owner] | index.is_recent(rows)
        rows, owner = rows[wanted], owner[wanted]
    num = np.bincount(owner, minlength=num_slots)
    scale, share = settings.reward_inverse_temperature, settings.uniform_share
    values = index.columns.get("reward", rows)
    ends = np.cumsum(num)
    filled = np.arange(num.max()) < num[:, None]
    # fewer than K rollouts can only be drawn with replacement
    repeat = num < size
    chosen = np.empty((num_slots, size), dtype=np.int64)
    if not repeat.all():
        terms, noise = np.full(filled.shape, -np.inf), np.zeros(filled.shape)
        flat_noise = gumbel_noise(len(values), rng)
        if scale and not share:
            flat_terms, noise_scale = gumbel_terms(values, inverse_temperature=scale, uniform_share=0.0)
            is_recent = recent[owner]
            # recent slots are uniform: equal terms, and noise alone decides
            terms[filled] = np.where(is_recent, 0.0, flat_terms)
            noise[filled] = np.where(is_recent, flat_noise, noise_scale * flat_noise)
        else:
            terms[filled] = _log_probabilities(values, num, recent, scale, share)
            noise[filled] = flat_noise
        chosen[~repeat] = gumbel_top_k(terms[~repeat], noise[~repeat], size)
    if repeat.any():
        p = np.zeros(filled.shape)
        p[filled] = np.exp(_log_probabilities(values, num, recent, scale, share))
        ends_p = np.cumsum(p[repeat], axis=1)
        # inverse transform sampling, one row of cumulative weights per slot
        targets = rng.random((len(ends_p), size)) * ends_p[:, -1:]
        at = np.count_nonzero(ends_p[:, None, :] <= targets[:, :, None], axis=2)
        chosen[repeat] = np.minimum(at, num[repeat, None] - 1)
    return rows[chosen + (ends - num)[:, None]]


def _log_probabilities(
    values: NDArray[np.float64], num: NDArray[np.int64], recent: NDArray[np.bool_], scale: float, share: float
) -> NDArray[np.float64]:
    """Return log p of each candidate rollout [n]: those of one slot after the other, `num` [S] per slot."""
    uniform = np.repeat(-np.log(num), num)
    if not scale or share >= 1 or recent.all():
        return uniform
    starts = np.cumsum(num) - num
    with np.errstate(over="ignore"):
        # minus the largest of the slot, so that exp does not overflow
        top = np.repeat(np.maximum.reduceat(values, starts), num)
        logits = np.maximum(scale * (values - top), LOWEST)
    log_p = logits - np.repeat(np.log(np.add.reduceat(np.exp(logits), starts)), num)
    if share > 0:
        # (1 - u) softmax + u / n, in logs
        log_p = np.logaddexp(np.log1p(-share) + log_p, np.log(share) + uniform)
    return np.where(np.repeat(recent, num), uniform, log_p)


def _draw_from_big(
    index: Index, settings: SamplingSection, prompt: int, recent: bool, num_slots: int, rng: np.random.Generator
) -> Rows:
    """Draw K rows for each of `num_slots` slots of one prompt, with the prompt's tree. [S, K]"""
    tree = index.trees.of_prompt(prompt, settings.reward_inverse_temperature)
    block, size = index.rows_by_prompt.rows(prompt), settings.group_size
    # recent rollouts are the last ones, and drawn uniformly
    first = tree.num_before(int(np.searchsorted(block, index.first_recent()))) if recent else 0

    def draw(num: int) -> NDArray[np.int64]:
        if recent:
            return tree.by_rank(rng.integers(first, tree.num, num))
        return tree.draw(num, settings.uniform_share, rng)

    def weigh() -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        if not recent:
            return tree.gumbel_terms(settings.uniform_share)
        leaves = tree.by_rank(np.arange(first, tree.num))
        return leaves, np.zeros(len(leaves)), 1.0

    if (index.recent_counts if recent else index.drawable_counts)[prompt] < size:
        return block[draw(num_slots * size).reshape(num_slots, size)]
    return block[_distinct(draw, weigh, num_slots, size, rng)]


Draw = Callable[[int], NDArray[np.int64]]
Weigh = Callable[[], tuple[NDArray[np.int64], NDArray[np.float64], float]]


def _distinct(draw: Draw, weigh: Weigh, num_slots: int, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `size` different leaves for each slot, one after the other without replacement. [S, size]

    Args:
        draw: returns the leaves of as many independent draws as its argument says.
        weigh: returns all leaves as `Priorities.gumbel_terms` does; called if independent draws repeat too often.
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
        chosen[slot] = list(islice(leaves, size))
    return chosen
