"""The scorers, by kind."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from tba_reward.scorer import BadDataError, Item, Rule, params_of
from tba_reward.scorers import Tools, exact, format, last_number, math

from tba.config.reward import AnyScorerSpec, FormatSpec

# ---- The shipped rewards --------------------------------------------------------------------------------------------


FIELD = {"field": "answer"}


def scored(rule: Rule, response: str, data: dict) -> float:
    return rule(Item(prompt="", response=response, data=data), FIELD)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        *(("a b", "a b", 1.0), (" a b\n", "a b", 1.0), ("a  b", "a b", 0.0), ("A b", "a b", 0.0), ("", "a b", 0.0)),
        *(("12", 12, 1.0), ("012", "12", 0.0)),
    ],
)
def test_exact_compares_text(response: str, answer: object, reward: float) -> None:
    assert scored(exact.score, response, {"answer": answer}) == reward


@pytest.mark.parametrize("data", [{}, {"answer": None}, {"answer": 1.5}, {"answer": True}, {"answer": [None]}])
def test_an_answer_that_is_no_text_is_bad_data(data: dict) -> None:
    with pytest.raises(BadDataError, match="data needs a text `answer`"):
        scored(exact.score, "1", data)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 1,234.", "1234"),
        ("#### 72", "72"),
        ("$18.50 each", "18.5"),
        ("first 3, then 4", "4"),
        ("it is -5 degrees", "-5"),
        ("x=-5", "-5"),
        ("x = \u22125", "-5"),
        ("10\u22123", "3"),
        ("10-3", "3"),
        ("(8)-3", "3"),
        ("half: .5", "0.5"),
        ("v1.2.3", "0.3"),
        ("1 000", "0"),
        ("7%", "7"),
        ("**9**\n", "9"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert Fraction(str(last_number.last_number(text))) == Fraction(number)


@pytest.mark.parametrize("text", ["", "none", "-", "...", ",,,", "\u0663"])
def test_a_text_without_a_number_is_a_wrong_answer(text: str) -> None:
    assert last_number.last_number(text) is None
    assert scored(last_number.score, text, {"answer": "3"}) == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so 1,008", "1,008", 1.0),
        ("so 1008.00", "1,008", 1.0),
        ("1008 apples for 3", "1008", 0.0),
        ("0.1", 0.1, 1.0),
        ("5", 5, 1.0),
        ("10000000000000000000000000000001", "10000000000000000000000000000000", 0.0),
        ("7", "+7", 1.0),
        ("+7", "+7", 1.0),
        ("-7", "+7", 0.0),
        ("0.0000001", 1e-07, 1.0),
        ("0.3", 0.1 + 0.2, 1.0),
        ("6", ["5", "6", 7], 1.0),
        ("7", ["5", "6", 7], 1.0),
        ("8", ["5", "6", 7], 0.0),
        ("6", ["six", "6"], 1.0),
        ("<think>6</think> 5", "6", 0.0),
        ("<think>5</think> 6", "6", 1.0),
        ("5 <think> no: 6", "6", 0.0),
    ],
)
def test_last_number_compares_numbers_exactly(response: str, answer: object, reward: float) -> None:
    assert scored(last_number.score, response, {"answer": answer}) == reward


@pytest.mark.parametrize(
    "data",
    [{}, {"answer": "six"}, {"answer": "1 2"}, {"answer": True}, {"answer": ""}]
    + [{"answer": gold} for gold in ("++7", "+-7", "+", float("inf"), float("nan"), ["six"], ["5", "six"])],
)
def test_last_number_needs_one_number(data: dict) -> None:
    with pytest.raises(BadDataError, match="that is one number"):
        scored(last_number.score, "6", data)


def test_any_answer_of_a_list_is_right() -> None:
    assert [scored(exact.score, text, {"answer": ["a", "b", 3]}) for text in ("a", "b", "3", "c")] == [1, 1, 1, 0]
    for rule in (exact.score, last_number.score):
        with pytest.raises(BadDataError, match="an empty list"):
            scored(rule, "1", {"answer": []})
    with pytest.raises(BadDataError, match="one number"):
        scored(last_number.score, "6", {"answer": ["five", 7]})
    assert scored(last_number.score, "7", {"answer": ["five", 7]}) == 1.0


@given(st.text(alphabet="0123456789+-*/() .e_", max_size=40) | st.text(max_size=40))
def test_no_text_makes_a_reward_raise_or_take_another_value(text: str) -> None:
    assert scored(last_number.score, text, {"answer": "24"}) in (0.0, 1.0)


# ---- Kind `format`, the settings of all kinds of this package, and what their versions depend on ------


SPECS = TypeAdapter[AnyScorerSpec](AnyScorerSpec)
TOOLS = Tools(pool=None, models=None)  # type: ignore[arg-type]  # nothing is started here


@pytest.mark.parametrize(
    ("pattern", "response", "score"),
    [
        (r"<answer>\d+</answer>", "so <answer>42</answer>!", 1.0),
        (r"\A<answer>\d+</answer>\Z", "so <answer>42</answer>!", 0.0),
        (r"(?s)\A<think>.*</think>\s*\d+\Z", "<think>a\nb</think>\n42", 1.0),
        (r"(?i)yes", "YES", 1.0),
        ("", "anything", 1.0),
    ],
)
def test_format_finds_a_pattern(pattern: str, response: str, score: float) -> None:
    params = params_of(FormatSpec(kind="format", pattern=pattern))
    assert format.score(Item(prompt="", response=response), params) == score


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"kind": "format", "pattern": "("}, "is not a regular expression"),
        ({"kind": "http", "url": "ftp://somewhere"}, "https?"),
        ({"kind": "math", "extract": "first"}, "'boxed' or 'anywhere'"),
        ({"kind": "last_number", "feild": "x"}, "Extra inputs"),
        ({"kind": "no_such_kind"}, "does not match any of the expected tags"),
    ],
)
def test_settings_that_are_wrong_are_refused(spec: dict, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint.replace("?", r"\?")):
        SPECS.validate_python(spec)


@pytest.mark.parametrize(
    ("kind", "spec", "other"),
    [
        (exact, {"kind": "exact"}, {"field": "gold"}),
        (last_number, {"kind": "last_number"}, {"field": "gold"}),
        (math, {"kind": "math"}, {"extract": "anywhere"}),
        (format, {"kind": "format", "pattern": "x"}, {"pattern": "y"}),
    ],
)
def test_a_version_is_that_of_the_settings(kind: object, spec: dict, other: dict) -> None:
    def version(**more: object) -> str:
        return kind.build(SPECS.validate_python({**spec, **more}), TOOLS).version  # type: ignore[attr-defined]

    assert version() == version(weight=2.0, gate=0.5, timeout_s=9.0)
    assert version() != version(**other)
