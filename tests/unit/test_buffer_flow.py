"""Flow control: who waits for whom, and never both."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.flow import FlowCounts, FlowSettings, generation_room, sampling_wait

from tests.support.buffer import make_recipe


def make_settings(**sampling: object) -> FlowSettings:
    return FlowSettings.of(make_recipe(sampling=sampling, trainer={"sync_interval": 3}))


def make_counts(**changes: int | bool) -> FlowCounts:
    values: dict = {
        "stored": 100,
        "can_fill_slot": True,
        "inserted": 100,
        "leased": 0,
        "drawn": 0,
        "inserted_since_mark": 0,
        "batches_since_mark": 0,
    }
    return FlowCounts(**{**values, **changes})


def test_sampling_waits_for_the_minimum_size_and_for_a_prompt_with_a_group() -> None:
    settings = make_settings(min_size_to_sample=8)
    assert sampling_wait(make_counts(stored=7), settings) == "rollouts"
    assert sampling_wait(make_counts(stored=8), settings) is None
    assert sampling_wait(make_counts(can_fill_slot=False), settings) == "rollouts"


def test_without_samples_per_insert_neither_side_waits_for_the_other() -> None:
    settings = make_settings()
    assert sampling_wait(make_counts(drawn=10**9), settings) is None
    assert generation_room(make_counts(inserted=10**9), settings) == (None, None)


def test_samples_per_insert_stops_the_faster_side_at_its_error_margin() -> None:
    settings = make_settings(samples_per_insert=2.0, samples_per_insert_error=50)
    assert sampling_wait(make_counts(inserted=100, drawn=234), settings) is None
    assert sampling_wait(make_counts(inserted=100, drawn=235), settings) == "samples-per-insert"
    assert generation_room(make_counts(inserted=100, drawn=152), settings) == (1, None)
    assert generation_room(make_counts(inserted=100, drawn=150), settings) == (0, "trainer-ahead")


def test_leased_rollouts_count_before_they_arrive() -> None:
    settings = make_settings(samples_per_insert=1.0, samples_per_insert_error=50)
    assert generation_room(make_counts(inserted=100, drawn=100, leased=30), settings) == (20, None)
    assert generation_room(make_counts(inserted=100, drawn=100, leased=50), settings) == (0, "trainer-ahead")


def test_alternate_generates_one_interval_then_trains_one_interval() -> None:
    settings = make_settings(alternate=True)
    assert settings.rollouts_per_interval == 48
    generating = make_counts(inserted_since_mark=40)
    assert sampling_wait(generating, settings) == "alternate-generate"
    assert generation_room(generating, settings) == (8, None)
    assert generation_room(make_counts(inserted_since_mark=40, leased=8), settings) == (0, "alternate-train")
    training = make_counts(inserted_since_mark=48, batches_since_mark=2)
    assert sampling_wait(training, settings) is None
    assert generation_room(training, settings) == (0, "alternate-train")
    assert sampling_wait(make_counts(inserted_since_mark=48, batches_since_mark=3), settings) == "alternate-generate"


@given(
    samples_per_insert=st.floats(0.05, 50),
    error=st.floats(1, 2000),
    alternate=st.booleans(),
    stored=st.integers(0, 200),
    evicted=st.integers(0, 10_000),
    drawn=st.integers(0, 100_000),
    can_fill_slot=st.booleans(),
    since_mark=st.integers(0, 100),
    batches_since_mark=st.integers(0, 2),
)
def test_the_two_sides_never_wait_for_each_other(
    samples_per_insert: float,
    error: float,
    alternate: bool,
    stored: int,
    evicted: int,
    drawn: int,
    can_fill_slot: bool,
    since_mark: int,
    batches_since_mark: int,
) -> None:
    settings = make_settings(
        samples_per_insert=samples_per_insert,
        samples_per_insert_error=error,
        alternate=alternate,
        min_size_to_sample=64,
    )
    counts = make_counts(
        stored=stored,
        inserted=stored + evicted,
        drawn=drawn,
        can_fill_slot=can_fill_slot,
        inserted_since_mark=min(since_mark, stored + evicted),
        batches_since_mark=batches_since_mark,
    )
    room, _ = generation_room(counts, settings)
    assert sampling_wait(counts, settings) is None or room is None or room > 0
