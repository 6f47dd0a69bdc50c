"""The order of visits is a function of the cursor, the seed and the prompts."""

from __future__ import annotations

import pytest
from tba_buffer.prompts.catalog import Catalog, VisitCursor, VisitOrder

from tests.support.buffer import make_prompts, make_recipe
from tests.support.index_values import make_index


def place(cursor: str) -> VisitCursor:
    return VisitCursor.parse(cursor.encode(), num_train=9)


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own() -> None:
    catalog, index = Catalog.__new__(Catalog), make_index()
    catalog.train = make_prompts(7)
    order = VisitOrder(catalog, make_recipe())
    visits = order.next(None, 21, index)
    epochs = [[visit.prompt_id for visit in visits[at : at + 7]] for at in (0, 7, 14)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({visit.visit_id for visit in visits}) == 21
    again = VisitOrder(catalog, make_recipe())
    assert [v.prompt_id for v in again.next(place(visits[9].cursor_after), 11, index)] == [
        v.prompt_id for v in visits[10:]
    ]
    catalog.train = make_prompts(9)
    assert [v.prompt_id for v in order.next(place(visits[9].cursor_after), 4, index)] == [
        v.prompt_id for v in visits[10:14]
    ]
    assert {v.prompt_id for v in order.next(place(visits[13].cursor_after), 9, index)} == {
        f"train-{i}" for i in range(9)
    }


@pytest.mark.parametrize(
    "cursor", [b"", b"junk", b"\xff", b"0:1", b"0:1:2:3", b"-1:0:9", b"0:5:4", b"0:0:10", b"0:-1:9"]
)
def test_a_damaged_cursor_is_no_place(cursor: bytes) -> None:
    with pytest.raises(ValueError):
        VisitCursor.parse(cursor, num_train=9)
