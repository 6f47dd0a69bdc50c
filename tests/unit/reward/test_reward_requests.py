"""The body of a score request: a bad item is an error of that item alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_reward.app import read_items

from tba.api import ScoreItem, ScoreResult
from tba.errors import LimitError, MalformedError, WireError

GOOD = {"item_id": "good", "task": "addition", "prompt": "6+6=", "response": "12", "data": {"answer": "12"}}


DEEP = json.loads("[" * 40 + "]" * 40)


def read(body: bytes, **limits: int) -> list[ScoreItem | ScoreResult]:
    return read_items(body, **{"max_items": 10, "max_text_chars": 1000, **limits})


def body_of(*items: Any) -> bytes:
    return json.dumps({"items": items}).encode()


@pytest.mark.parametrize(
    ("bad", "item_id", "reason", "detail"),
    [
        ({**GOOD, "response": None}, "good", "malformed", "response: Input should be a valid string"),
        ({**GOOD, "surprise": 1}, "good", "malformed", "surprise: Extra inputs are not permitted"),
        ({**GOOD, "finish_reason": "LENGTH"}, "good", "malformed", "finish_reason: String should match pattern"),
        ({"item_id": "x"}, "x", "malformed", "task: Field required"),
        ({**GOOD, "item_id": ""}, "item 1", "malformed", "item_id: "),
        ({**GOOD, "item_id": 7}, "item 1", "malformed", "item_id: "),
        ({**GOOD, "data": [1]}, "good", "malformed", "data: "),
        ({**GOOD, "data": {"answer": ["\udfff"]}}, "good", "malformed", "data: 'utf-8' codec can't encode"),
        ({**GOOD, "data": {"answer": 10**2000}}, "good", "malformed", "data: holds a whole number of more than"),
        ({**GOOD, "data": {"answer": DEEP}}, "good", "malformed", "data: nested deeper than 32 levels"),
        ({**GOOD, "prompt": "6\udfff"}, "good", "malformed", "the prompt holds a lone surrogate"),
        ({**GOOD, "response": "\ud800"}, "good", "malformed", "the response holds a lone surrogate"),
        ({**GOOD, "item_id": "\ud800"}, "item 1", "malformed", ""),
        (7, "item 1", "malformed", ""),
        (None, "item 1", "malformed", ""),
        ([], "item 1", "malformed", ""),
        ({**GOOD, "response": "x" * 1001}, "good", "too_long", "the response has 1001 characters, the limit is 1000"),
        ({**GOOD, "prompt": "x" * 1001}, "good", "too_long", "the prompt has 1001 characters"),
    ],
)
def test_a_bad_item_has_an_error_of_its_own_and_spoils_no_other(
    bad: Any, item_id: str, reason: str, detail: str
) -> None:
    first, found, last = read(body_of(GOOD, bad, GOOD))
    assert isinstance(first, ScoreItem)
    assert first == last
    assert isinstance(found, ScoreResult)
    assert found.error is not None
    assert (found.item_id, found.error.reason) == (item_id, reason)
    assert detail in found.error.detail


def test_a_number_that_python_does_not_parse_fails_its_item_alone() -> None:
    first, found = read(body_of(GOOD, {**GOOD, "data": {"answer": 7}}).replace(b": 7}", b": " + b"7" * 5000 + b"}"))
    assert isinstance(first, ScoreItem)
    assert isinstance(found, ScoreResult)
    assert found.error is not None
    assert "data: holds a whole number of more than" in found.error.detail


@pytest.mark.parametrize("response", ["", "\u0000", "\U0001f600", "é" * 1000, "\\ud800", '"}]}'])
def test_every_text_is_taken_as_it_is(response: str) -> None:
    for ensure_ascii in (True, False):
        body = json.dumps({"items": [{**GOOD, "response": response}]}, ensure_ascii=ensure_ascii).encode()
        (found,) = read(body)
        assert isinstance(found, ScoreItem)
        assert found.response == response


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[]", "the body must be an object"),
        (b'{"items": {}}', "the body must be an object"),
        (b'{"items": []}', "items is empty"),
        (b'{"items": [1], "extra": 1}', "and nothing else"),
        (b"[" * 100_000 + b"]" * 100_000, "the body is not JSON"),
        (b'{"items": ' + b"[" * 100_000, "the body is not JSON"),
        (b'{"items": ["' + b"[" * 100_000, "the body is not JSON"),
    ],
)
def test_a_body_that_is_no_request_is_refused_as_a_whole(body: bytes, sentence: str) -> None:
    with pytest.raises(MalformedError, match=sentence):
        read(body)


def test_too_many_items_are_refused() -> None:
    with pytest.raises(LimitError, match="11 items, the limit is 10"):
        read(body_of(*[GOOD] * 11))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(JSON | st.fixed_dictionaries(dict.fromkeys(GOOD, JSON)), min_size=1, max_size=4), st.binary(max_size=3))
def test_whatever_comes_there_is_one_answer_per_item_or_one_refusal(items: list[Any], noise: bytes) -> None:
    body = body_of(*items)
    for sent in (body, body.replace(b"0", noise)):
        try:
            found = read(sent)
        except WireError:
            assert sent != body
            continue
        assert all(isinstance(each, ScoreItem) or each.error is not None for each in found)
        for each in found:
            each.model_dump_json().encode()
        if sent == body:
            assert len(found) == len(items)
