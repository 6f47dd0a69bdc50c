"""Flow control: searchers and trainer wait for each other, and never both without end."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tba_buffer.run.state import DrawLimits, FlowCounts, FlowSettings, draw_limits, generation_room, sampling_wait

from tests.support.buffer import make_recipe

VISIT = 4


def make_settings(max_rollouts: int = 200_000, **sampling: object) -> FlowSettings:
    recipe = make_recipe(
        sampling=sampling, trainer={"sync_interval": 3}, buffer={"max_rollouts": max_rollouts, "max_bytes": 10**9}
    )
    return FlowSettings.of(recipe)


def make_counts(**changes: int | bool) -> FlowCounts:
    values: dict = {"stored": 100, "can_fill_slot": True, "inserted": 100, "publications": 7}
    zeros = ("pending", "leased", "drawn", "inserted_since_publication", "batches_since_publication")
    return FlowCounts(**{**dict.fromkeys(zeros, 0), **values, **changes})


def test_sampling_waits_for_the_minimum_size_and_for_a_prompt_with_a_group() -> None:
    settings = make_settings(min_size_to_sample=8)
    assert sampling_wait(make_counts(stored=7), settings) == "rollouts"
    assert sampling_wait(make_counts(stored=8), settings) is None
    assert sampling_wait(make_counts(can_fill_slot=False), settings) == "rollouts"
    assert sampling_wait(make_counts(recent_missing=1), settings) == "recent"
    assert sampling_wait(make_counts(recent_missing=1, stored=7), settings) == "rollouts"


def test_without_samples_per_insert_neither_side_waits_for_the_other() -> None:
    settings = make_settings()
    assert sampling_wait(make_counts(drawn=10**9), settings) is None
    assert draw_limits(make_counts(drawn=10**9), settings) == DrawLimits()
    assert generation_room(make_counts(inserted=10**9), settings) == (None, None)


def test_samples_per_insert_stops_the_faster_side_at_its_error_margin() -> None:
    settings = make_settings(samples_per_insert=2.0, samples_per_insert_error=50)
    assert sampling_wait(make_counts(inserted=100, drawn=234), settings) is None
    assert sampling_wait(make_counts(inserted=100, drawn=235), settings) == "samples-per-insert"
    assert draw_limits(make_counts(inserted=100), settings) == DrawLimits(max_drawn=250)
    assert generation_room(make_counts(inserted=100, drawn=152), settings) == (1, None)
    assert generation_room(make_counts(inserted=100, drawn=150), settings) == (0, "trainer-ahead")


def test_leased_and_pending_rollouts_count_before_they_arrive() -> None:
    settings = make_settings(samples_per_insert=1.0, samples_per_insert_error=50)
    assert generation_room(make_counts(inserted=100, drawn=100, leased=30), settings) == (20, None)
    assert generation_room(make_counts(inserted=100, drawn=100, leased=50), settings) == (0, "trainer-ahead")
    assert generation_room(make_counts(inserted=100, drawn=100, pending=30), settings) == (20, None)
    assert generation_room(make_counts(inserted=100, drawn=100, leased=20, pending=30), settings) == (0, "unscored")
    assert generation_room(make_counts(inserted=100, drawn=50, pending=30), settings) == (0, "trainer-ahead")


def test_unscored_rollouts_never_fill_more_than_half_of_the_buffer() -> None:
    for sampling in ({}, {"samples_per_insert": 8.0}, {"alternate": True}):
        settings = make_settings(100, **sampling)
        assert generation_room(make_counts(pending=50, drawn=10_000), settings) == (0, "unscored")
        assert generation_room(make_counts(pending=47, drawn=10_000), settings)[1] != "trainer-ahead"


def test_while_nothing_can_be_drawn_as_much_is_leased_as_is_missing() -> None:
    settings = make_settings(samples_per_insert=0.1, min_size_to_sample=64)
    empty = {"stored": 0, "inserted": 0, "can_fill_slot": False}
    assert generation_room(make_counts(**empty, drawn=0), settings)[0] == math.floor(512 / 0.1)
    stuck = {**empty, "inserted": 10**6}
    assert generation_room(make_counts(**stuck), settings) == (64, None)
    assert generation_room(make_counts(**stuck, leased=60), settings) == (4, None)
    assert generation_room(make_counts(**stuck, leased=60, pending=4), settings) == (0, "unscored")
    assert generation_room(make_counts(**{**stuck, "stored": 70}), settings) == (1, None)
    assert generation_room(make_counts(**{**stuck, "stored": 70}, leased=1), settings) == (0, "trainer-ahead")


def test_alternate_generates_one_interval_then_trains_one_interval() -> None:
    settings = make_settings(alternate=True)
    assert settings.rollouts_per_interval == 48
    generating = make_counts(inserted_since_publication=40)
    assert sampling_wait(generating, settings) == "alternate-generate"
    assert generation_room(generating, settings) == (8, None)
    assert generation_room(make_counts(inserted_since_publication=40, leased=8), settings) == (0, "alternate-train")
    assert generation_room(make_counts(inserted_since_publication=40, pending=8), settings) == (0, "unscored")
    training = make_counts(inserted_since_publication=48, batches_since_publication=2)
    assert sampling_wait(training, settings) is None
    assert draw_limits(training, settings) == DrawLimits(max_batches=3, publications=7)
    assert generation_room(training, settings) == (0, "alternate-train")
    trained = make_counts(inserted_since_publication=48, batches_since_publication=3)
    assert sampling_wait(trained, settings) == "alternate-generate"
    # all are used up, and the next phase begins with a publication
    trained = make_counts(inserted_since_publication=48, batches_since_publication=3, stored=0)
    assert generation_room(trained, settings) == (0, "alternate-train")


@given(
    samples_per_insert=st.one_of(st.floats(0.05, 5000), st.integers(1, 5000)),
    error=st.floats(1, 2000),
    alternate=st.booleans(),
    stored=st.integers(0, 200),
    evicted=st.integers(0, 10_000),
    excess=st.integers(-6000, 6000),
    can_fill_slot=st.booleans(),
    recent_missing=st.sampled_from([0, 1, 300]),
    since_publication=st.integers(0, 100),
    batches_since_publication=st.integers(0, 2),
)
@example(50.0, 16.0, False, 100, 0, 5, True, 0, 0, 0)  # one rollout allows more samples than the error margin
@settings(max_examples=300)
def test_the_two_sides_never_wait_for_each_other(
    samples_per_insert: float,
    error: float,
    alternate: bool,
    stored: int,
    evicted: int,
    excess: int,
    can_fill_slot: bool,
    recent_missing: int,
    since_publication: int,
    batches_since_publication: int,
) -> None:
    settings = make_settings(
        samples_per_insert=samples_per_insert,
        samples_per_insert_error=error,
        alternate=alternate,
        min_size_to_sample=64,
    )
    inserted = stored + evicted
    counts = make_counts(
        stored=stored,
        inserted=inserted,
        drawn=max(0, math.floor(samples_per_insert * inserted) + excess),  # near the line, where it is decided
        can_fill_slot=can_fill_slot,
        recent_missing=recent_missing,
        inserted_since_publication=min(since_publication, inserted),
        batches_since_publication=batches_since_publication,
    )
    room, _ = generation_room(counts, settings)
    assert sampling_wait(counts, settings) is None or room is None or room > 0


@dataclass
class World:
    """The actions of searchers, scorer, trainer and evictor, as far as flow control lets them."""

    settings: FlowSettings
    max_rollouts: int
    stored: int = 0
    pending: int = 0
    inserted: int = 0
    drawn: int = 0
    since_publication: int = 0
    publications: int = 0
    batches_since_publication: int = 0
    waits_for_recent: bool = False
    recent: list[int] = field(default_factory=lambda: [0, 0])
    """Scored rollouts stored before and since the last publication, after the one before it."""
    leases: list[int] = field(default_factory=list)
    """Rollouts that each lease still owes."""
    open_batches: list[int] = field(default_factory=list)
    """The number of publications at which each was drawn."""

    @property
    def counts(self) -> FlowCounts:
        return FlowCounts(
            stored=self.stored,
            pending=self.pending,
            can_fill_slot=self.stored >= 2,
            inserted=self.inserted,
            leased=sum(self.leases),
            drawn=self.drawn,
            inserted_since_publication=self.since_publication,
            batches_since_publication=self.batches_since_publication,
            publications=self.publications,
            recent_missing=max(0, self.settings.batch_rollouts - self.num_recent) if self.waits_for_recent else 0,
        )

    @property
    def num_recent(self) -> int:
        return self.stored if self.publications < 2 else min(self.stored, sum(self.recent))

    def lease(self, visits: int) -> str | None:
        room, wait = generation_room(self.counts, self.settings)
        assert (room == 0) == (wait is not None)
        granted = visits if room is None else min(visits, math.ceil(room / VISIT))
        self.leases += [VISIT] * granted
        return wait

    def push(self, part: int, *, scored: bool) -> None:
        num = min(part, self.leases[0])
        self.leases[0] -= num
        if not self.leases[0]:
            del self.leases[0]
        if scored:
            self.insert(num)
        else:
            self.pending += num
        self.evict(max(0, self.stored + self.pending - self.max_rollouts), scored_first=True)

    def score(self, num: int, *, known: bool) -> None:
        num = min(num, self.pending)
        self.pending -= num
        if known:
            self.insert(num)

    def insert(self, num: int) -> None:
        self.stored += num
        self.inserted += num
        self.since_publication += num
        self.recent[1] += num

    def evict(self, num: int, *, scored_first: bool) -> None:
        of_scored = min(num if scored_first else max(0, num - self.pending), self.stored)
        self.stored -= of_scored
        self.pending -= min(num - of_scored, self.pending)

    def draw(self) -> str | None:
        wait = sampling_wait(self.counts, self.settings)
        if wait is None:
            limits = draw_limits(self.counts, self.settings)
            self.drawn += self.settings.batch_rollouts
            self.batches_since_publication += 1
            self.open_batches.append(self.publications)
            assert limits.max_drawn is None or self.drawn <= limits.max_drawn
            assert limits.max_batches is None or self.batches_since_publication <= limits.max_batches
        return wait

    def end_batch(self, *, acked: bool) -> None:
        published = self.open_batches.pop(0)
        if not acked:
            self.drawn -= self.settings.batch_rollouts
            self.batches_since_publication -= published == self.publications

    def publish(self) -> None:
        self.since_publication = self.batches_since_publication = 0
        self.publications += 1
        self.recent = [self.recent[1], 0]


class Flow(RuleBasedStateMachine):
    """Anything that flow control allows, in any order."""

    world: World

    @initialize(
        samples_per_insert=st.none() | st.floats(0.1, 40),
        error=st.floats(1, 200),
        alternate=st.booleans(),
        min_size=st.integers(1, 60),
        max_rollouts=st.integers(64, 400),
        waits_for_recent=st.booleans(),
    )
    def begin(
        self,
        samples_per_insert: float | None,
        error: float,
        alternate: bool,
        min_size: int,
        max_rollouts: int,
        waits_for_recent: bool,
    ) -> None:
        settings = make_settings(
            max_rollouts,
            samples_per_insert=samples_per_insert,
            samples_per_insert_error=error,
            alternate=alternate,
            min_size_to_sample=min_size,
        )
        self.world = World(settings, max_rollouts, waits_for_recent=waits_for_recent)

    @rule(visits=st.integers(1, 30))
    def lease(self, visits: int) -> None:
        self.world.lease(visits)

    @precondition(lambda self: self.world.leases)
    @rule(part=st.integers(1, VISIT), scored=st.booleans())
    def push(self, part: int, scored: bool) -> None:
        self.world.push(part, scored=scored)

    @precondition(lambda self: self.world.leases)
    @rule()
    def lease_expires(self) -> None:
        del self.world.leases[0]

    @rule(num=st.integers(1, 40), known=st.booleans())
    def score(self, num: int, known: bool) -> None:
        self.world.score(num, known=known)

    @rule(num=st.integers(0, 100), scored_first=st.booleans())
    def evict(self, num: int, scored_first: bool) -> None:
        self.world.evict(num, scored_first=scored_first)

    @rule()
    def draw(self) -> None:
        self.world.draw()

    @precondition(lambda self: self.world.open_batches)
    @rule(acked=st.booleans())
    def end_batch(self, acked: bool) -> None:
        self.world.end_batch(acked=acked)

    @rule()
    def publish(self) -> None:
        self.world.publish()

    @invariant()
    def when_both_wait_something_is_under_way(self) -> None:
        world = self.world
        has_trained = world.settings.alternate and world.batches_since_publication >= world.settings.sync_interval
        # after the last batch of a phase of `alternate` a publication is under way
        if not has_trained and sampling_wait(world.counts, world.settings) is not None:
            room, _ = generation_room(world.counts, world.settings)
            assert room is None or room > 0 or world.leases or world.pending

    @invariant()
    def once_all_is_well_the_trainer_draws_on(self) -> None:
        """Open work ends well; then searchers, scorer and trainer take turns."""
        world = copy.deepcopy(self.world)
        goal = world.drawn + 3 * world.settings.batch_rollouts
        for _ in range(2000):
            while world.leases:
                world.push(VISIT, scored=True)
            world.score(world.pending, known=True)
            world.draw()
            if world.drawn >= goal:
                return
            if world.settings.alternate and world.batches_since_publication >= world.settings.sync_interval:
                world.publish()  # a trainer publishes after every interval
            world.lease(8)
        raise AssertionError(f"the trainer waits for ever: {world.counts}")

    @invariant()
    def while_rewards_are_away_generation_stops_under_a_name(self) -> None:
        world = copy.deepcopy(self.world)
        waited, margin = None, world.settings.error / (world.settings.samples_per_insert or 1.0)
        for _ in range(world.max_rollouts + math.ceil(margin + world.drawn)):
            world.pending += sum(world.leases)  # nothing is evicted: the worst case
            world.leases.clear()
            waited = world.lease(8)
            if waited is not None:
                break
        assert waited == "unscored" or waited in ("trainer-ahead", "alternate-train")
        if sampling_wait(world.counts, world.settings) in ("rollouts", "recent", "alternate-generate"):
            assert waited == "unscored"


Flow.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestFlow = Flow.TestCase
