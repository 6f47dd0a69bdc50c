"""Cursors: read back exactly what was written, and say what is wrong with any other text."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.rollouts.queries import MAX_CURSOR_CHARS, ORDERS, Cursor, parse_cursor

from tba.errors import BadRequestError


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
