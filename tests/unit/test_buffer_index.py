"""The index is a function of the log: whatever is cut off the log after an eviction, the view is the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.index import Index, LogGapError
from tba_buffer.log import Event, Evicted, Mark, RolloutsAdded, pack_record, parse_entry
from tba_buffer.prompts import Catalog, VisitOrder

from tba.versions import PolicyVersion
from tests.support.buffer import make_prompts, make_rollout


def added(first_position: int, prompts: list[int], *, step: int = 0, reward: float | None = 1.0) -> RolloutsAdded:
    rollouts = [make_rollout(reward=reward, version=PolicyVersion(1, step)) for _ in prompts]
    packed = b"".join(
        pack_record(rollout, prompt_number=prompt, num_bytes=10)
        for rollout, prompt in zip(rollouts, prompts, strict=True)
    )
    event = parse_entry(f"{first_position + len(prompts) - 1}-0".encode(), {b"r": packed})
    assert isinstance(event, RolloutsAdded)
    return event


def make_index(*events: Event) -> Index:
    index = Index(num_marks_kept=4)
    for event in events:
        index.apply(event)
    return index


def test_a_record_comes_back_as_it_was_packed() -> None:
    rollout = make_rollout(reward=-2.5, version=PolicyVersion(3, 10**11))
    event = parse_entry(b"7-0", {b"r": pack_record(rollout, prompt_number=9, num_bytes=123)})
    assert isinstance(event, RolloutsAdded)
    (record,) = event.records
    assert event.first_position == 7
    assert record["rollout_id"].tobytes() == rollout.rollout_id
    assert (record["reward"], record["lineage"], record["step"]) == (-2.5, 3, 10**11)
    assert (record["prompt"], record["num_bytes"], record["status"]) == (9, 123, 0)


def test_only_scored_rollouts_can_be_drawn() -> None:
    index = make_index(added(1, [0, 0]), added(3, [0, 1], reward=None))
    assert (index.num_live, index.num_scored) == (4, 2)
    assert index.rows(0).tolist() == [0, 1]
    assert index.rows(1).tolist() == []


def test_recent_is_what_arrived_since_the_mark_before_the_newest() -> None:
    events = [added(1, [0]), Mark(2, PolicyVersion(1, 0)), added(3, [1]), Mark(4, PolicyVersion(1, 4)), added(5, [2])]
    index = make_index(*events[:2])
    assert index.recent_rows("arrival", 1)[1].tolist() == [0]
    index.apply(events[2])
    index.apply(events[3])
    assert index.recent_rows("arrival", 1)[1].tolist() == [1]
    index.apply(events[4])
    assert index.recent_rows("arrival", 1)[1].tolist() == [1, 2]


def test_recent_by_version_is_what_the_last_publications_made() -> None:
    index = make_index(
        Mark(1, PolicyVersion(1, 0)),
        added(2, [0], step=0),
        Mark(3, PolicyVersion(1, 4)),
        added(4, [1], step=0),
        added(5, [2], step=4),
        Mark(6, PolicyVersion(1, 8)),
    )
    assert index.recent_rows("version", 1)[1].tolist() == []
    assert index.recent_rows("version", 2)[1].tolist() == [2]
    assert index.recent_rows("version", 3)[1].tolist() == [0, 1, 2]


def test_a_gap_in_the_log_is_noticed() -> None:
    index = make_index(added(1, [0, 0]))
    with pytest.raises(LogGapError):
        index.apply(added(4, [0]))
    with pytest.raises(LogGapError):
        index.apply(added(2, [0]))


@given(st.lists(st.one_of(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.just("mark")), max_size=40))
def test_an_index_rebuilt_from_the_trimmed_log_is_identical(steps: list[list[int] | str]) -> None:
    """A model of push.lua: at most 10 rollouts, the oldest evicted, entries before the first survivor cut off."""
    index, log, marks, position, first_live = Index(num_marks_kept=4), [], [], 0, 1
    rollout_positions: list[int] = []
    for number, step in enumerate(steps):
        events: list[Event] = []
        if isinstance(step, str):
            marks = [*marks, Mark(position + 1, PolicyVersion(1, number))][-4:]
            events.append(marks[-1])
        else:
            events.append(added(position + 1, step))
            rollout_positions += range(position + 1, position + 1 + len(step))
        position += len(step) if not isinstance(step, str) else 1
        if len(rollout_positions) > 10:
            first_live = rollout_positions[-11] + 1
            rollout_positions = rollout_positions[-10:]
            position += 1
            events.append(Evicted(position, first_live, "max_rollouts", tuple(marks)))
        for event in events:
            index.apply(event)
            log.append((index.position, event))
        log = [(last, event) for last, event in log if last >= first_live]
        rebuilt = make_index(*(event for _, event in log))
        assert rebuilt.num_live == len(rollout_positions)
        assert rebuilt.fingerprint() == index.fingerprint()
        for window in ("arrival", "version"):
            positions = [i.recent_rows(window, 2)[1].tolist() for i in (index, rebuilt)]
            assert positions[0] == positions[1]


def test_rewards_and_ids_survive_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_buffer.index.COMPACT_ROWS", 4)
    index, kept = Index(num_marks_kept=2), []
    for number in range(30):
        event = added(index.position + 1, [0, 1], reward=float(number))
        index.apply(event)
        kept = [*kept, *(record["rollout_id"].tobytes() for record in event.records)][-6:]
        first_live = event.first_position - 6  # each round takes two positions for rollouts and one for the eviction
        index.apply(Evicted(index.position + 1, max(1, first_live), "max_rollouts", ()))
        assert index.rollout_ids(index.rows(1)) == kept[1::2]
        assert np.all(index.rewards(index.rows(0)) == np.arange(max(0, number - 2), number + 1))


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own() -> None:
    catalog = Catalog.__new__(Catalog)
    catalog.train = make_prompts(7)
    order = VisitOrder(catalog, seed=3)
    visits = order.next("", 21)
    epochs = [[visit.prompt_id for visit in visits[at : at + 7]] for at in (0, 7, 14)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({visit.visit_id for visit in visits}) == 21
    assert [v.prompt_id for v in VisitOrder(catalog, seed=3).next(visits[9].cursor_after, 11)] == [
        v.prompt_id for v in visits[10:]
    ]
    catalog.train = make_prompts(9)
    assert [v.prompt_id for v in order.next(visits[9].cursor_after, 4)] == [v.prompt_id for v in visits[10:14]]
    assert {v.prompt_id for v in order.next(visits[13].cursor_after, 9)} == {f"train-{i}" for i in range(9)}
