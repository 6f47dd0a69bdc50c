"""Pages over an index, and the cursors between them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tba_buffer.index.log import RECORD_DTYPE, Evicted, RolloutsAdded, pack_record
from tba_buffer.index.rollout_index import Index, IndexSettings
from tba_buffer.rollouts.selection import MAX_CURSOR_CHARS, ORDERS, Cursor, Selection, parse_cursor, select_rows

from tba.api import RolloutOrder
from tba.errors import BadRequestError
from tba.versions import PolicyVersion
from tests.support.buffer import make_recipe

# ---- Pages over an index --------------------------------------------------------------------------------------------


STATUSES = ("scored", "pending", "failed")
Item = tuple[int, float, int, str]  # prompt, reward, step, status

items = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.0, -2.0]), st.integers(0, 2), st.sampled_from(STATUSES)),
    min_size=1,
    max_size=40,
)


def add(index: Index, rollouts: Sequence[Item]) -> None:
    first = index.position + 1
    records = b"".join(
        pack_record(
            struct.pack(">QQ", 0, first + i),
            reward=reward if status == "scored" else None,
            version=PolicyVersion(1 if step else 0, step),
            prompt=prompt,
            num_bytes=100,
            num_tokens=10,
            token_hash=0,
            status=status,
        )
        for i, (prompt, reward, step, status) in enumerate(rollouts)
    )
    index.apply(RolloutsAdded(first, np.frombuffer(records, dtype=RECORD_DTYPE)))


def new_index() -> Index:
    return Index(IndexSettings.of(make_recipe()))


def expected(live: dict[int, Item], selection: Selection) -> list[int]:
    """Positions in the order of the selection, by sorting everything."""
    version, first, last = selection.version, selection.from_version, selection.to_version
    low, high = selection.min_reward, selection.max_reward
    found = [
        position
        for position, (prompt, reward, step, status) in live.items()
        if selection.prompt in (None, prompt)
        and (selection.prompts is None or prompt in selection.prompts)
        and (version is None or version == PolicyVersion(1 if step else 0, step))
        and (first is None or first <= PolicyVersion(1 if step else 0, step))
        and (last is None or last >= PolicyVersion(1 if step else 0, step))
        and (low is None or (status == "scored" and reward >= low))
        and (high is None or (status == "scored" and reward <= high))
        and selection.status in (None, status)
        and (status == "scored" or selection.order not in ("best", "worst"))
    ]
    match selection.order:
        case "newest":
            return sorted(found, reverse=True)
        case "oldest":
            return sorted(found)
        case "best":
            return sorted(found, key=lambda p: (-live[p][1], -p))
    return sorted(found, key=lambda p: (live[p][1], -p))


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
    index = new_index()
    add(index, rollouts)
    live = dict(enumerate(rollouts, start=1))
    assert positions(index, select_rows(index, selection, num)) == expected(live, selection)[:num]


@settings(deadline=None)
@given(data=st.data(), rollouts=items, order=st.sampled_from(ORDERS), size=st.integers(1, 7))
def test_pages_neither_repeat_nor_skip_what_stays_while_others_come_and_go(
    data: st.DataObject, rollouts: list[Item], order: RolloutOrder, size: int
) -> None:
    index = new_index()
    add(index, rollouts)
    live = dict(enumerate(rollouts, start=1))
    stays, seen = set(live), []
    after: Cursor | None = None
    while True:
        rows = select_rows(index, Selection(order=order, after=after), size)
        if not len(rows):
            break
        page = positions(index, rows)
        seen += page
        reward = live[page[-1]][1] if order in ("best", "worst") else 0.0
        after = Cursor(order, reward, page[-1])
        gone = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True, max_size=3), label="gone") if live else []
        index.apply(Evicted(index.position + 1, np.array(gone, dtype=np.uint64), "max_rollouts"))
        stays -= set(gone)
        live = {position: item for position, item in live.items() if position not in gone or position == page[-1]}
        if len(seen) < 60:
            more = data.draw(items.map(lambda found: found[:2]), label="more")
            live.update(dict(enumerate(more, start=index.position + 1)))
            add(index, more)
        live = {position: item for position, item in live.items() if position not in gone}
    assert len(seen) == len(set(seen))
    assert set(expected({p: rollouts[p - 1] for p in stays}, Selection(order=order))) <= set(seen)


@pytest.mark.parametrize("order", ORDERS)
def test_an_empty_index_has_no_rows(order: RolloutOrder) -> None:
    assert len(select_rows(new_index(), Selection(order=order), 10)) == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("position", [0, 2**63, 2**64 - 1])
def test_a_cursor_beyond_any_log_is_no_error(order: RolloutOrder, position: int) -> None:
    index = new_index()
    add(index, [(0, 0.0, 0, "scored")] * 3)
    found = len(select_rows(index, Selection(order=order, after=Cursor(order, 0.0, position)), 10))
    assert found == (3 if (position == 0) == (order == "oldest") else 0)


def test_a_rollout_is_found_by_its_id_while_it_lives() -> None:
    index = new_index()
    assert len(index.row_of(struct.pack(">QQ", 0, 1))) == 0
    add(index, [(0, 0.0, 0, "scored")] * 5)
    (row,) = index.row_of(struct.pack(">QQ", 0, 3))
    assert positions(index, np.array([row])) == [3]
    index.apply(Evicted(index.position + 1, np.array([1, 3], dtype=np.uint64), "max_rollouts"))
    assert len(index.row_of(struct.pack(">QQ", 0, 3))) == 0
    assert len(index.row_of(struct.pack(">QQ", 3, 0))) == 0
    assert len(index.row_of(struct.pack(">QQ", 0, 4))) == 1


# ---- Cursors --------------------------------------------------------------------------------------------------------


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
