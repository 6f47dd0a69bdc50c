"""The index is a function of the log: compared with a plain model after any events, however it got them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tba_buffer.index import priorities, rollout_index, tables
from tba_buffer.index.log import SLOT_DTYPE, Drawn, Event, Publication, Resumed, Voided
from tba_buffer.index.priorities import SumTree
from tba_buffer.index.rollout_index import Index, IndexSettings, LogGapError
from tba_buffer.index.tables import PromptSet
from tba_buffer.sampling.mop import draw_slots

from tba.versions import PolicyVersion
from tests.support.index_values import (
    Item,
    fingerprint,
    make_added,
    make_evicted,
    make_index,
    make_rescored,
    make_sampling,
    rollout_id_at,
)

VERSIONS = [PolicyVersion(0, 0), PolicyVersion(1, 4), PolicyVersion(1, 8), PolicyVersion(2, 4)]
NUM_PROMPTS = 5

items = st.builds(
    Item,
    prompt=st.integers(0, NUM_PROMPTS - 1),
    reward=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    status=st.sampled_from(["scored", "scored", "scored", "pending", "failed"]),
    version=st.sampled_from(VERSIONS),
    num_bytes=st.integers(1, 1000),
)
shares = st.lists(st.floats(0, 0.999), max_size=12)
slots = st.tuples(st.integers(0, NUM_PROMPTS - 1), st.booleans(), st.integers(0, 4), st.integers(0, 2))
draws = st.tuples(st.lists(slots, min_size=1, max_size=6), shares, st.sampled_from(VERSIONS))
steps = st.one_of(
    st.tuples(st.just("push"), st.lists(items, min_size=1, max_size=12)),
    st.tuples(st.just("push"), st.lists(items, min_size=1, max_size=12)),
    st.tuples(st.just("evict"), shares),
    st.tuples(st.just("evict oldest"), st.integers(0, 30)),
    st.tuples(st.just("rescore"), st.lists(st.tuples(st.floats(0, 0.999), items), max_size=6)),
    st.tuples(st.just("mark"), st.sampled_from(VERSIONS)),
    st.tuples(st.just("draw"), draws),
    st.tuples(st.just("draw"), draws),
    st.tuples(st.just("void"), st.lists(st.integers(0, 12), max_size=3)),
    st.tuples(st.just("resume"), st.lists(st.sampled_from(VERSIONS), max_size=3)),
)
index_settings = st.builds(
    IndexSettings,
    alternate=st.booleans(),
    min_distinct=st.integers(1, 3),
    max_uses=st.sampled_from([None, 1, 2]),
    big_prompt=st.sampled_from([2, 512]),
)


@dataclass
class Model:
    """The stored rollouts, as a dictionary."""

    settings: IndexSettings
    position: int = 0
    stored: dict[int, Item] = field(default_factory=dict)
    publications: list[Publication] = field(default_factory=list)
    uses: Counter[int] = field(default_factory=Counter)
    turns: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """By prompt and whether its slot was recent."""
    floors: Counter[bool] = field(default_factory=Counter)
    draws: dict[str, Drawn] = field(default_factory=dict)
    num_draws: int = 0

    def step(self, kind: str, value) -> Event:
        """The event of one step; the model takes it too."""
        first, self.position = self.position + 1, self.position + (len(value) if kind == "push" else 1)
        positions = list(self.stored)
        if kind == "push":
            self.stored.update({first + number: item for number, item in enumerate(value)})
            return make_added(first, value)
        if kind == "mark":
            publication = Publication(first, value)
            self.publications = [*self.publications, publication][-rollout_index.NUM_PUBLICATIONS_KEPT :]
            return publication
        if kind == "draw":
            return self.draw(first, *value)
        if kind == "void":
            for number in value:
                self.give_back(f"b{number}")
            return Voided(first, tuple(f"b{number}" for number in value))
        if kind == "resume":
            last = {version.lineage: version.step for version in value}
            for batch_id, drawn in list(self.draws.items()):
                if drawn.version.step > last.get(drawn.version.lineage, -1):
                    self.give_back(batch_id)
            return Resumed(first, tuple(value))
        if kind == "rescore":
            changes = {positions[int(at * len(positions))]: item for at, item in value} if positions else {}
            for at, item in changes.items():
                old = self.stored[at]
                self.stored[at] = replace(item, prompt=old.prompt, version=old.version)
            return make_rescored(first, {**changes, first + 10**6: Item()})
        gone = (
            positions[:value]
            if kind == "evict oldest"
            else [positions[int(at * len(positions))] for at in value if positions]
        )
        for at in gone:
            self.stored.pop(at, None)
        return make_evicted(first, [*gone, *gone[:1], first])

    def draw(self, position: int, taken: list, chosen: list[float], version: PolicyVersion) -> Drawn:
        every = list(self.stored)
        positions = sorted({every[int(at * len(every))] for at in chosen} if every else set())
        packed = np.array([(p, recent, turn, floor) for p, recent, turn, floor in taken], dtype=SLOT_DTYPE)
        drawn = Drawn(position, f"b{self.num_draws}", version, packed, np.array(positions, dtype="<u8"))
        self.num_draws += 1
        for prompt, recent, turn, floor in taken:
            if turn:
                self.turns[prompt, recent] = max(turn, self.turns[prompt, recent])
                self.floors[recent] = max(floor, self.floors[recent])
        self.uses.update(positions)
        self.draws[drawn.batch_id] = drawn
        return drawn

    def give_back(self, batch_id: str) -> None:
        drawn = self.draws.pop(batch_id, None)
        for prompt, recent, turn, _ in [] if drawn is None else drawn.slots.tolist():
            if turn:
                left = max(0, self.turns[prompt, bool(recent)] - 1)
                self.turns[prompt, bool(recent)] = left
                self.floors[recent] = min(left, self.floors[recent])
        self.uses.subtract([] if drawn is None else drawn.positions.tolist())

    def drawable(self, prompt: int | None = None) -> list[int]:
        """Positions that batches may hold."""
        bound = self.settings.max_uses
        return [at for at in self.positions(prompt=prompt) if bound is None or self.uses[at] < bound]

    def due(self, recent: bool) -> set[int]:
        """Prompts of a pool with no more turns than its floor."""
        able = self.recent() if recent else self.drawable()
        num = Counter(self.stored[at].prompt for at in able)
        return {
            prompt
            for prompt in range(NUM_PROMPTS)
            if num[prompt] >= self.settings.min_distinct and self.turns[prompt, recent] <= self.floors[recent]
        }

    def positions(self, status: str | None = "scored", prompt: int | None = None) -> list[int]:
        """Stored positions, ascending."""
        return [
            at
            for at, item in sorted(self.stored.items())
            if status in (None, item.status) and prompt in (None, item.prompt)
        ]

    def recent(self) -> list[int]:
        """Positions of drawable rollouts that are recent."""
        windows = self.publications[-1:] if self.settings.alternate else self.publications[-2:-1]
        after = windows[0].position if windows else 0
        return [at for at in self.drawable() if at > after]


def check_counts(index: Index, model: Model) -> None:
    stored = model.stored.values()
    assert (index.position, index.publications) == (model.position, model.publications)
    assert (index.num_live, index.num_scored) == (len(stored), len(model.positions()))
    assert (index.num_pending, index.num_failed) == (len(model.positions("pending")), len(model.positions("failed")))
    assert index.payload_bytes == sum(item.num_bytes for item in stored)
    assert index.versions() == {v: n for v in sorted(VERSIONS) if (n := sum(item.version == v for item in stored))}
    recent = model.recent()
    for prompt in range(len(index.counts)):
        scored = model.positions(prompt=prompt)
        assert index.counts[prompt] == len(scored)
        assert index.live_counts[prompt] == len(model.positions(None, prompt))
        assert index.successes[prompt] == sum(model.stored[at].reward >= 1 for at in scored)
        assert index.drawable_counts[prompt] == len(model.drawable(prompt))
        assert index.recent_counts[prompt] == sum(model.stored[at].prompt == prompt for at in recent)
    assert index.num_drawable == np.count_nonzero(index.drawable_counts >= model.settings.min_distinct)
    assert index.num_used_up == len(model.positions()) - len(model.drawable())
    for pool, due in enumerate(index.due):
        assert set(due.by_rank(np.arange(due.num)).tolist()) == model.due(recent=bool(pool))


def check_rows(index: Index, model: Model) -> None:
    def positions(rows: np.ndarray) -> list[int]:
        return index.column("position", rows).tolist()

    everything = model.positions(None)
    assert positions(index.live_rows()) == everything
    assert positions(index.live_rows(newest=3)) == everything[-3:]
    assert positions(index.oldest_rows(4)) == everything[:4]
    assert positions(index.pending_rows(2)) == model.positions("pending")[:2]
    assert positions(index.pending_rows(10**6)) == model.positions("pending")
    assert positions(index.recent_rows()) == model.recent()
    for prompt in range(NUM_PROMPTS + 1):
        assert positions(index.prompt_rows(prompt)) == model.positions(prompt=prompt)
        assert positions(index.prompt_rows(prompt, scored_only=False)) == model.positions(None, prompt)
    rows = index.rows_at(np.arange(model.position + 2))
    assert positions(rows[rows >= 0]) == everything
    live = index.live_rows()
    assert index.rollout_ids(live) == [rollout_id_at(at) for at in everything]
    assert index.column("lineage", live).tolist() == [model.stored[at].version.lineage for at in everything]
    assert index.columns.get("uses", live).tolist() == [model.uses[at] for at in everything]
    assert index.column("step", live).tolist() == [model.stored[at].version.step for at in everything]
    assert index.column("num_bytes", live).tolist() == [model.stored[at].num_bytes for at in everything]
    assert index.column("token_hash", live).tolist() == [31 * at for at in everything]
    scored = index.rows_at(np.array(model.positions(), dtype=np.int64))
    assert index.column("reward", scored).tolist() == [model.stored[at].reward for at in model.positions()]


def drawn(index: Index) -> list[object]:
    """Return the content of some draws of every kind, by rollout id."""
    results: list[object] = []
    for seed, prioritise in enumerate(("within", "across")):
        changes: Any = {"group_size": 3, "most_on_policy_prob": 0.5, "uniform_share": 0.1, "prioritise": prioritise}
        draw = make_sampling(prompts_per_batch=4, inverse_temperature=2.0, **changes)
        if index.num_drawable:
            slots = draw_slots(index, draw, seed)
            results += [(slot.prompt, slot.source, index.rollout_ids(slot.rows)) for slot in slots]
    return results


@settings(deadline=None, max_examples=80)
@given(st.lists(steps, max_size=30), index_settings, st.sampled_from([4, 32]), st.lists(st.integers(1, 6), max_size=8))
def test_any_history_leads_to_what_a_plain_model_holds(
    history: list, configuration: IndexSettings, min_capacity: int, batches: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_index, "NUM_PUBLICATIONS_KEPT", 4)
        patch.setattr(tables, "_MIN_CAPACITY", min_capacity)  # the ring turns, grows and is compacted
        model, index, events = Model(configuration), Index(configuration), []
        for kind, value in history:
            events.append(model.step(kind, value))
            index.apply(events[-1])
            if len(events) % 4 == 0:
                drawn(index)  # from here on there are trees to be kept up to date
        check_counts(index, model)
        check_rows(index, model)

        in_batches, todo = Index(configuration), list(events)
        for size in [*batches, len(events) + 1]:
            in_batches.apply_many(todo[:size])
            del todo[:size]
        from_checkpoint = Index(configuration)
        from_checkpoint.restore(index.checkpoint())
        for other in (in_batches, from_checkpoint):
            assert fingerprint(other) == fingerprint(index)
            assert drawn(other) == drawn(index)


@pytest.mark.parametrize("oldest_first", [True, False])
def test_a_full_buffer_that_turns_over_holds_what_a_plain_model_holds(
    oldest_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of rows that are gone are used again while blocks still name them."""
    monkeypatch.setattr(tables, "_MIN_CAPACITY", 32)
    monkeypatch.setattr(rollout_index, "NUM_PUBLICATIONS_KEPT", 4)
    rng = np.random.default_rng(0)
    configuration = IndexSettings(big_prompt=4)
    model, index = Model(configuration), Index(configuration)
    for number in range(60):
        pushed = [Item(prompt=int(rng.integers(NUM_PROMPTS)), reward=float(rng.integers(4))) for _ in range(9)]
        index.apply(model.step("push", pushed))
        excess = len(model.stored) - 24
        if excess > 0 and oldest_first:
            index.apply(model.step("evict oldest", excess))
        elif excess > 0:
            index.apply(model.step("evict", rng.random(excess).tolist()))
        if number % 10 == 9:
            index.apply(model.step("mark", VERSIONS[number % 4]))
        check_counts(index, model)
        check_rows(index, model)
        rebuilt = Index(configuration)
        rebuilt.restore(index.checkpoint())
        assert drawn(rebuilt) == drawn(index)


def test_a_checkpoint_and_the_events_after_it_are_the_whole_log() -> None:
    model = Model(IndexSettings())
    events = [model.step("push", [Item(prompt=at % 3, reward=at)] * 4) for at in range(10)]
    before, after = make_index(*events[:5]), make_index(*events)
    restored = Index(IndexSettings())
    restored.restore(before.checkpoint())
    restored.apply_many(events[5:])
    assert fingerprint(restored) == fingerprint(after)
    with pytest.raises(ValueError, match="fresh"):
        restored.restore(before.checkpoint())


def test_a_gap_in_the_log_is_noticed_and_nothing_of_the_batch_is_applied() -> None:
    index = make_index(make_added(1, [Item(), Item()]))
    before = fingerprint(index)
    for events in (
        [make_added(4, [Item()])],
        [make_added(2, [Item()])],
        [make_added(3, [Item()]), make_evicted(5, [1])],
    ):
        with pytest.raises(LogGapError):
            index.apply_many(events)
        assert fingerprint(index) == before


def test_a_fresh_index_begins_anywhere() -> None:
    index = make_index(make_added(1000, [Item(), Item()]))
    assert index.position == 1001
    assert index.column("position", index.live_rows()).tolist() == [1000, 1001]


def test_memory_stays_bounded_while_rollouts_come_and_go() -> None:
    index, sizes = make_index(), []
    for number in range(300):
        event = make_added(index.position + 1, [Item(prompt=(number * 7 + at) % 40) for at in range(64)])
        index.apply(event)
        if index.num_live > 2000:
            gone = index.column("position", index.oldest_rows(64)).tolist()
            index.apply(make_evicted(index.position + 1, gone))
        sizes.append(index.memory_bytes())
    assert index.num_live == 1984
    assert sizes[-1] <= 1.5 * sizes[100]


def test_versions_that_are_gone_leave_no_trace() -> None:
    index = make_index()
    for number in range(200):
        items = [Item(version=PolicyVersion(1, number)), Item(version=PolicyVersion(2, number))]
        index.apply(make_added(index.position + 1, items))
        index.apply(make_evicted(index.position + 1, [index.position - 1, index.position]))
    assert index.versions() == {}
    assert len(index._versions.counts) == 16


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=70),
    st.lists(st.dictionaries(st.integers(0, 69), st.integers(0, 2**40), max_size=9), max_size=12),
    st.sampled_from([1, 4, 4096]),
)
def test_find_and_before_agree_with_running_sums(weights: list[int], changes: list[dict[int, int]], top: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priorities, "_TOP", top)
        tree, model = SumTree(len(weights)), np.zeros(128, dtype=np.int64)
        tree.build(np.array(weights))
        model[: len(weights)] = weights
        for change in changes:
            leaves = np.array(sorted(leaf for leaf in change if leaf < tree.capacity), dtype=np.int64)
            model[leaves] = [change[leaf] for leaf in leaves.tolist()]
            tree.set(leaves, model[leaves])
        assert tree.total == model.sum()
        assert [tree.before(leaf) for leaf in range(tree.capacity + 1)] == [
            int(model[:leaf].sum()) for leaf in range(tree.capacity + 1)
        ]
        if tree.total:
            starts = np.cumsum(model) - model
            targets = np.unique(np.concatenate([starts[model > 0], (starts + model - 1)[model > 0]]))
            leaves, rest = tree.find(targets)
            assert leaves.tolist() == (np.searchsorted(np.cumsum(model), targets, side="right")).tolist()
            assert (starts[leaves] + rest).tolist() == targets.tolist()


@given(st.lists(st.dictionaries(st.integers(0, 300), st.booleans(), max_size=20), max_size=20))
def test_a_prompt_set_knows_its_members_by_rank(rounds: list[dict[int, bool]]) -> None:
    prompts, model = PromptSet(), set[int]()
    prompts.grow(301)
    for changes in rounds:
        prompts.put(np.array(list(changes), dtype=np.int64), np.array(list(changes.values()), dtype=bool))
        model = {p for p in model if changes.get(p, True)} | {p for p, joins in changes.items() if joins}
        assert prompts.num == len(model)
        assert prompts.by_rank(np.arange(prompts.num)).tolist() == sorted(model)
    prompts.put_all(np.array([True, False, True]))
    assert prompts.by_rank(np.arange(prompts.num)).tolist() == [0, 2]
