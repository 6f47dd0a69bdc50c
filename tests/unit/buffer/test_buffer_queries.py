"""Pages over an index, and the cursors between them."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tba_buffer.index.rollout_index import Index
from tba_buffer.rollouts.selection import MAX_CURSOR_CHARS, ORDERS, Cursor, Selection, parse_cursor, select_rows

from tba.api import RolloutOrder
from tba.errors import BadRequestError
from tba.versions import START, PolicyVersion
from tests.support.index_values import Item, make_added, make_evicted, make_index, rollout_id_at

STATUSES = ("scored", "pending", "failed")

VERSIONS = (START, PolicyVersion(1, 1), PolicyVersion(1, 2))
rewards, versions = st.sampled_from([0.0, 0.5, 1.0, -2.0]), st.sampled_from(VERSIONS)
item = st.builds(Item, prompt=st.integers(0, 2), reward=rewards, version=versions, status=st.sampled_from(STATUSES))
items = st.lists(item, min_size=1, max_size=40)


def expected(live: dict[int, Item], selection: Selection) -> list[int]:
    """Positions in the order of the selection, by sorting everything."""
    first, last, low, high = selection.from_version, selection.to_version, selection.min_reward, selection.max_reward
    found = [
        position
        for position, item in live.items()
        if selection.prompt in (None, item.prompt)
        and (selection.prompts is None or item.prompt in selection.prompts)
        and selection.version in (None, item.version)
        and (first is None or first <= item.version)
        and (last is None or last >= item.version)
        and (low is None or (item.status == "scored" and item.reward >= low))
        and (high is None or (item.status == "scored" and item.reward <= high))
        and selection.status in (None, item.status)
        and (item.status == "scored" or selection.order not in ("best", "worst"))
    ]
    if selection.order in ("newest", "oldest"):
        return sorted(found, reverse=selection.order == "newest")
    sign = -1 if selection.order == "best" else 1
    return sorted(found, key=lambda p: (sign * live[p].reward, -p))


def positions(index: Index, rows: np.ndarray) -> list[int]:
    return index.column("position", rows).tolist()


selections = st.builds(
    Selection,
    order=st.sampled_from(ORDERS),
    prompt=st.sampled_from([None, 0, 1, 2]),
    version=st.sampled_from([None, PolicyVersion(0, 0), PolicyVersion(1, 2)]),
    prompts=st.sampled_from([None, np.array([0, 2]), np.array([], dtype=np.int64)]),
    from_version=st.sampled_from([None, PolicyVersion(0, 5), PolicyVersion(1, 2)]),
    to_version=st.sampled_from([None, PolicyVersion(0, 0), PolicyVersion(0, 9), PolicyVersion(1, 1)]),
    min_reward=st.sampled_from([None, 0.5]),
    max_reward=st.sampled_from([None, 0.5, -3.0]),
    status=st.sampled_from([None, *STATUSES]),
).filter(lambda s: not s.by_reward or s.status in (None, "scored"))


@given(rollouts=items, selection=selections, num=st.integers(1, 45))
def test_a_page_is_the_beginning_of_the_sorted_whole(rollouts: list[Item], selection: Selection, num: int) -> None:
    index = make_index(make_added(1, rollouts))
    live = dict(enumerate(rollouts, start=1))
    assert positions(index, select_rows(index, selection, num)) == expected(live, selection)[:num]


@settings(deadline=None)
@given(data=st.data(), rollouts=items, order=st.sampled_from(ORDERS), size=st.integers(1, 7))
def test_pages_neither_repeat_nor_skip_what_stays_while_others_come_and_go(
    data: st.DataObject, rollouts: list[Item], order: RolloutOrder, size: int
) -> None:
    index = make_index(make_added(1, rollouts))
    live = dict(enumerate(rollouts, start=1))
    stays, seen = set(live), []
    after: Cursor | None = None
    while True:
        rows = select_rows(index, Selection(order=order, after=after), size)
        if not len(rows):
            break
        page = positions(index, rows)
        seen += page
        reward = live[page[-1]].reward if order in ("best", "worst") else 0.0
        after = Cursor(order, reward, page[-1])
        gone = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True, max_size=3), label="gone") if live else []
        index.apply(make_evicted(index.position + 1, gone))
        stays -= set(gone)
        live = {position: item for position, item in live.items() if position not in gone or position == page[-1]}
        if len(seen) < 60:
            more = data.draw(items.map(lambda found: found[:2]), label="more")
            live.update(dict(enumerate(more, start=index.position + 1)))
            index.apply(make_added(index.position + 1, more))
        live = {position: item for position, item in live.items() if position not in gone}
    assert len(seen) == len(set(seen))
    assert set(expected({p: rollouts[p - 1] for p in stays}, Selection(order=order))) <= set(seen)


@pytest.mark.parametrize("order", ORDERS)
def test_an_empty_index_has_no_rows(order: RolloutOrder) -> None:
    assert len(select_rows(make_index(), Selection(order=order), 10)) == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("position", [0, 2**63, 2**64 - 1])
def test_a_cursor_beyond_any_log_is_no_error(order: RolloutOrder, position: int) -> None:
    index = make_index(make_added(1, [Item()] * 3))
    found = len(select_rows(index, Selection(order=order, after=Cursor(order, 0.0, position)), 10))
    assert found == (3 if (position == 0) == (order == "oldest") else 0)


def test_a_rollout_is_found_by_its_id_while_it_lives() -> None:
    index = make_index(make_added(1, [Item()] * 5))
    assert positions(index, index.row_of(rollout_id_at(3))) == [3]
    index.apply(make_evicted(6, [1, 3]))
    found = {position: len(index.row_of(rollout_id_at(position))) for position in (1, 2, 3, 4, 9)}
    assert found == {1: 0, 2: 1, 3: 0, 4: 1, 9: 0}


@given(
    order=st.sampled_from(ORDERS),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    position=st.integers(0, 2**64 - 1),
)
def test_a_cursor_reads_back_as_it_was_written(order: str, reward: float, position: int) -> None:
    cursor = Cursor(order, reward, position)  # pyright: ignore[reportArgumentType]
    assert parse_cursor(str(cursor), cursor.order) == cursor
    assert len(str(cursor)) <= MAX_CURSOR_CHARS


@given(
    text=st.text(max_size=40)
    | st.binary(min_size=17, max_size=17)
    .filter(lambda b: b[0] != ORDERS.index("best"))
    .map(lambda b: base64.b64encode(b).decode())
)
def test_any_other_text_is_a_bad_request_that_names_it(text: str) -> None:
    with pytest.raises(BadRequestError, match=r"^cursor .* cannot be used: "):
        parse_cursor(text, "best")


def test_a_cursor_of_another_order_is_refused() -> None:
    with pytest.raises(BadRequestError, match="it is one of order 'worst', the request has order 'best'"):
        parse_cursor(str(Cursor("worst", 0.5, 7)), "best")
