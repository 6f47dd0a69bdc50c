"""Draws across batches: prompts take turns, no rollout is used too often."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tba_buffer.index.log import Event, Publication, Resumed, Voided
from tba_buffer.index.rollout_index import Index, IndexSettings
from tba_buffer.sampling.mop import Slot, draw_slots, drawn_event

from tba.config.sections import SamplingSection
from tba.versions import START, PolicyVersion
from tests.support.chi_square import assert_follows
from tests.support.index_values import Item, fingerprint, index_of, make_added, make_evicted, make_index, make_sampling

V1, V2 = PolicyVersion(1, 4), PolicyVersion(1, 8)
BOTH_WAYS = pytest.mark.parametrize("big_prompt", [512, 2])


@dataclass
class Run:
    """An index with its log, from which it could be built again."""

    index: Index
    log: list[Event]
    num_draws: int = 0

    @classmethod
    def of(cls, *events: Event, **settings) -> Run:
        return cls(make_index(*events, **settings), list(events))

    def apply(self, event: Event) -> None:
        self.index.apply(event)
        self.log.append(event)

    def draw(self, draw: SamplingSection, *, lineage: int = 1) -> list[Slot]:
        """The next batch, recorded as draw.lua records it."""
        self.num_draws += 1
        slots = draw_slots(self.index, draw, seed=self.num_draws)
        self.apply(drawn_event(self.index, slots, f"b{self.num_draws}", PolicyVersion(lineage, self.num_draws)))
        return slots

    def void(self, *numbers: int) -> None:
        self.apply(Voided(self.index.position + 1, tuple(f"b{number}" for number in numbers)))

    def rebuilt(self) -> Index:
        """What another process makes of a checkpoint in the middle and the events after it."""
        half = len(self.log) // 2
        before, after = Index(self.index.settings), Index(self.index.settings)
        before.apply_many(self.log[:half])
        after.restore(before.checkpoint())
        after.apply_many(self.log[half:])
        return after


@pytest.mark.parametrize("num_prompts", [7, 40])
@pytest.mark.parametrize("num_slots", [1, 3, 4, 16])
@pytest.mark.parametrize("most_on_policy_prob", [0.0, 1.0])
def test_every_prompt_is_used_before_one_is_again(num_prompts: int, num_slots: int, most_on_policy_prob: float) -> None:
    """After any number of batches the uses of two prompts differ by one at most."""
    run = Run(index_of([[0.0, 1.0]] * num_prompts), [])
    draw, uses = make_sampling(prompts_per_batch=num_slots, most_on_policy_prob=most_on_policy_prob), Counter[int]()
    for _ in range(200 // num_slots):
        slots = run.draw(draw)
        assert len({slot.prompt for slot in slots}) == min(num_slots, num_prompts)
        uses.update(slot.prompt for slot in slots)
        num = [uses[prompt] for prompt in range(num_prompts)]
        assert max(num) - min(num) <= 1


@settings(deadline=None, max_examples=60)
@given(
    m=st.sampled_from([0.0, 0.3, 0.8]),
    num_slots=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    steps=st.lists(st.sampled_from(["draw", "draw", "draw", "push", "mark", "evict"]), max_size=40),
)
def test_prompts_that_stay_have_their_turn_whatever_comes_and_goes(
    m: float, num_slots: int, seed: int, steps: list[str]
) -> None:
    """A slot never takes a prompt while one of the pool with fewer turns is new to the batch."""
    rng = np.random.default_rng(seed)
    run = Run.of(make_added(1, [Item(prompt=at // 2) for at in range(16)]))
    draw = make_sampling(prompts_per_batch=num_slots, most_on_policy_prob=m)
    for step in steps:
        index, position = run.index, run.index.position + 1
        if step == "push":
            run.apply(make_added(position, [Item(prompt=int(p)) for p in rng.integers(0, 14, 6)]))
        elif step == "mark":
            run.apply(Publication(position, PolicyVersion(1, position)))
        elif step == "evict":
            run.apply(make_evicted(position, index.column("position", index.live_rows())[:3].tolist()))
        elif index.num_drawable:
            pools = [set(pool.by_rank(np.arange(pool.num)).tolist()) for pool in index.drawable]
            turns = [
                {p: max(int(index.draws.turns[pool][p]), int(index.draws.floors[pool])) for p in pools[pool]}
                for pool in (0, 1)
            ]
            used = set[int]()
            for slot in run.draw(draw):
                if used >= pools[0]:
                    used.clear()
                pool = int(slot.source == "recent")
                lowest = min(turns[pool][p] for p in pools[pool] - used)
                assert turns[pool][slot.prompt] == lowest == slot.turn - 1
                turns[pool][slot.prompt] += 1
                used.add(slot.prompt)
    assert fingerprint(run.rebuilt()) == fingerprint(run.index)
    if run.index.num_drawable:
        again = [(slot.prompt, slot.rows.tolist()) for slot in draw_slots(run.rebuilt(), draw, seed)]
        rows = draw_slots(run.index, draw, seed)
        assert [at for _, at in again] == [  # other row numbers, the same rollouts
            run.rebuilt().rows_at(run.index.column("position", slot.rows)).tolist() for slot in rows
        ]


@pytest.mark.parametrize("num_prompts", [5, 30])
def test_what_is_left_of_an_epoch_is_chosen_uniformly(num_prompts: int) -> None:
    """Two turns are taken; the third is uniform among the others."""
    run = Run(index_of([[0.0, 1.0]] * num_prompts), [])
    taken = {run.draw(make_sampling())[0].prompt for _ in range(2)}
    chosen = [draw_slots(run.index, make_sampling(), seed)[0].prompt for seed in range(1500)]
    left = [prompt not in taken for prompt in range(num_prompts)]
    assert_follows(np.bincount(chosen, minlength=num_prompts), np.array(left) / sum(left))


def test_a_new_prompt_joins_the_round_that_is_running() -> None:
    run = Run(index_of([[0.0, 1.0]] * 3), [])
    for _ in range(31):  # ten rounds, and one prompt of the next
        run.draw(make_sampling())
    run.apply(make_added(run.index.position + 1, [Item(prompt=9), Item(prompt=9)]))
    assert len({run.draw(make_sampling())[0].prompt for _ in range(3)} & {0, 1, 2}) == 2  # the rest of the round, and 9
    uses = Counter(run.draw(make_sampling())[0].prompt for _ in range(40))
    assert set(uses.values()) == {10}


def test_recent_and_replay_slots_take_turns_apart() -> None:
    old, new = [Item(prompt=at // 2) for at in range(20)], [Item(prompt=at // 2) for at in range(8)]
    run = Run.of(make_added(1, old), Publication(21, V1), make_added(22, new), Publication(30, V2))
    uses = {"recent": Counter[int](), "replay": Counter[int]()}
    for _ in range(120):
        (slot,) = run.draw(make_sampling(most_on_policy_prob=0.4))
        uses[slot.source][slot.prompt] += 1
    for source, num_prompts in (("recent", 4), ("replay", 10)):
        num = [uses[source][prompt] for prompt in range(num_prompts)]
        assert sum(num) == uses[source].total() > 0
        assert max(num) - min(num) <= 1


def test_a_void_batch_gives_its_turns_and_uses_back() -> None:
    run = Run(index_of([[0.0, 1.0]] * 6, max_uses=1), [])
    before = run.index.pack_draws(), run.index.num_drawable
    first = {slot.prompt for slot in run.draw(make_sampling(prompts_per_batch=4))}
    assert {slot.prompt for slot in draw_slots(run.index, make_sampling(prompts_per_batch=2), 0)} == set(
        range(6)
    ) - first
    run.void(1, 77)
    assert (run.index.draws.turns.any(), run.index.num_used_up, run.index.num_drawable) == (False, 0, before[1])
    run.void(1)  # once is enough
    assert run.index.pack_draws() == before[0]


def test_a_resume_gives_back_what_it_abandons() -> None:
    run = Run(index_of([[0.0, 1.0]] * 8, max_uses=1), [])
    drawn = [run.draw(make_sampling())[0] for _ in range(5)]  # steps 1 to 5 of lineage 1
    run.apply(Resumed(run.index.position + 1, (PolicyVersion(1, 3), START)))
    kept = {slot.prompt for slot in drawn[:3]}
    assert run.index.num_used_up == 6
    slots = draw_slots(run.index, make_sampling(prompts_per_batch=5), seed=0)
    assert {slot.prompt for slot in slots} == set(range(8)) - kept
    run.void(5)  # it was given back already
    assert run.index.num_used_up == 6


def test_a_resume_over_the_end_of_an_epoch_opens_it_again() -> None:
    added = make_added(1, [Item(prompt=p, reward=r) for p in range(40) for r in (0.0, 1.0)])
    run, draw = Run.of(added), make_sampling(prompts_per_batch=16)
    first = [slot.prompt for slot in run.draw(draw)]
    for _ in range(4):
        run.draw(draw)
    assert run.index.draws.floors.tolist() == [1, 0]
    run.apply(Resumed(run.index.position + 1, (PolicyVersion(1, 1), START)))
    assert run.index.due[0].num == 40 - 16
    again = [slot.prompt for _ in range(2) for slot in run.draw(draw, lineage=2)]
    assert set(first + again) == set(range(40))
    assert not set(first) & set(again[:24])
    assert fingerprint(run.rebuilt()) == fingerprint(run.index)


def test_a_resume_at_the_start_leaves_nothing_that_a_rebuilt_index_does_not_know() -> None:
    run, draw = Run(index_of([[0.0, 1.0]] * 16), []), make_sampling(prompts_per_batch=16)
    for _ in range(2):
        run.draw(draw)
    run.apply(Resumed(run.index.position + 1, (START,)))
    rebuilt = Index(run.index.settings)
    rebuilt.restore(run.index.checkpoint())
    assert rebuilt.draws.floors.tolist() == run.index.draws.floors.tolist() == [0, 0]
    events = [
        drawn_event(index, draw_slots(index, draw, seed=5), "next", PolicyVersion(2, 1))
        for index in (run.index, rebuilt)
    ]
    assert events[0].pack() == events[1].pack()


def test_a_batch_that_is_void_after_the_next_round_began_has_its_turns_first() -> None:
    added = make_added(1, [Item(prompt=p, reward=r) for p in range(32) for r in (0.0, 1.0)])
    run, draw = Run.of(added), make_sampling(prompts_per_batch=16)
    batches = [[slot.prompt for slot in run.draw(draw)] for _ in range(3)]  # the third begins the second round
    run.void(2)
    uses = Counter(batches[0] + batches[2])
    for _ in range(8):
        uses.update(slot.prompt for slot in run.draw(draw))
        counts = [uses[prompt] for prompt in range(32)]
        assert max(counts) - min(counts) <= 2  # while it lasts
    assert max(counts) - min(counts) <= 1
    assert fingerprint(run.rebuilt()) == fingerprint(run.index)


def test_weighted_prompts_take_no_turns() -> None:
    run = Run(index_of([[0.0, 1.0]] * 4), [])
    run.draw(make_sampling(prompts_per_batch=3, prioritise="across"))
    assert not run.index.draws.turns.any()


@BOTH_WAYS
@pytest.mark.parametrize("prioritise", ["within", "across"])
@pytest.mark.parametrize("max_uses", [1, 3])
def test_no_rollout_is_in_more_batches_than_allowed_and_all_uses_are_spent(
    max_uses: int, prioritise: str, big_prompt: int
) -> None:
    run = Run(index_of([[0.0, 1.0, 2.0, 0.5]] * 5, max_uses=max_uses, big_prompt=big_prompt, min_distinct=1), [])
    draw = make_sampling(prompts_per_batch=2, most_on_policy_prob=0.3, inverse_temperature=1.0, prioritise=prioritise)
    uses = Counter[int]()
    while run.index.num_drawable:
        uses.update({int(row) for slot in run.draw(draw) for row in slot.rows})
        assert max(uses.values()) <= max_uses
        assert run.index.num_used_up == sum(num == max_uses for num in uses.values())
    assert uses == dict.fromkeys(range(20), max_uses)
    with pytest.raises(ValueError, match="no prompt has"):
        draw_slots(run.index, draw, 0)


@BOTH_WAYS
def test_the_bound_leaves_the_probabilities_of_the_others(big_prompt: int) -> None:
    """Rollout 2 is used up; pairs of the other three follow the softmax over them."""
    run = Run(index_of([[0.0, 1.0, 5.0, 0.5]], max_uses=1, big_prompt=big_prompt), [])
    draw_slots(run.index, make_sampling(inverse_temperature=1.0), 0)  # from here on there is a tree
    slot = Slot(0, "replay", False, np.array([2]), 1)
    run.apply(drawn_event(run.index, [slot], "b", PolicyVersion(1, 1)))
    slots = draw_slots(run.index, make_sampling(prompts_per_batch=4000, inverse_temperature=1.0), 1)
    first = np.bincount([slot.rows[0] for slot in slots], minlength=4)
    weights = np.exp([0.0, 1.0, -np.inf, 0.5])
    assert_follows(first, weights / weights.sum())
    assert all(2 not in slot.rows for slot in slots)


def test_another_bound_counts_the_same_uses() -> None:
    run = Run(index_of([[0.0, 1.0]] * 3), [])
    for _ in range(4):
        run.draw(make_sampling())
    for max_uses, num_used_up in ((None, 0), (1, 6), (2, 2), (3, 0)):
        other = Index(IndexSettings(max_uses=max_uses))
        other.restore(run.index.checkpoint())
        assert (other.num_used_up, other.num_drawable) == (num_used_up, (6 - num_used_up) / 2)
