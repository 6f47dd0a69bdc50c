"""The scorers, by kind."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from tba_reward.scorer import BadDataError, Item, Rule, params_of
from tba_reward.scorers import Tools, exact, format, last_number, length, math

from tba.config.reward import AnyScorerSpec, FormatSpec, LengthSpec

# ---- The shipped rewards --------------------------------------------------------------------------------------------


FIELD = {"field": "answer"}


def scored(rule: Rule, response: str, data: dict) -> float:
    return rule(Item(prompt="", response=response, data=data), FIELD)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("42", 1.0),
        (" \n42\t", 1.0),
        ("042", 1.0),
        ("+42", 1.0),
        ("-42", 0.0),
        ("42.0", 0.0),
        ("42.", 0.0),
        ("4 2", 0.0),
        ("42 43", 0.0),
        ("=42", 0.0),
        ("", 0.0),
        ("-", 0.0),
        ("\u0664\u0662", 0.0),
        ("0x2a", 0.0),
        ("4_2", 0.0),
        ("9" * 100_000, 0.0),
    ],
)
def test_addition_compares_integers(response: str, reward: float) -> None:
    assert scored(exact.score_integer, response, {"answer": "42"}) == reward


@given(st.integers(-(10**30), 10**30), st.integers(0, 5))
def test_leading_zeros_never_change_an_integer(number: int, num_zeros: int) -> None:
    sign = "-" if number < 0 else ""
    assert exact.canonical_integer(f"{sign}{'0' * num_zeros}{abs(number)}") == str(number)


@given(st.text(alphabet="0123456789+-. ", max_size=6), st.text(alphabet="0123456789+-. ", max_size=6))
def test_two_integers_are_the_same_exactly_when_python_says_so(left: str, right: str) -> None:
    def value(text: str) -> int | None:
        return int(text) if text.lstrip("+-").isdigit() and len(text) - len(text.lstrip("+-")) <= 1 else None

    same = value(left) is not None and value(left) == value(right)
    found = exact.canonical_integer(left)
    assert (found is not None and found == exact.canonical_integer(right)) == same


def test_minus_zero_is_zero() -> None:
    assert exact.canonical_integer("-000") == exact.canonical_integer("0") == "0"


def test_a_long_run_of_zeros_takes_linear_time() -> None:
    assert exact.canonical_integer("0" * 1_000_000 + "x") is None  # quadratic: hours, and nothing kills this rule


@pytest.mark.parametrize(
    ("response", "reward"), [("a b", 1.0), (" a b\n", 1.0), ("a  b", 0.0), ("A b", 0.0), ("", 0.0)]
)
def test_exact_compares_text(response: str, reward: float) -> None:
    assert scored(exact.score_text, response, {"answer": "a b"}) == reward


def test_exact_takes_012_and_12_for_different_texts() -> None:
    assert scored(exact.score_text, "012", {"answer": "12"}) == 0.0


@pytest.mark.parametrize("data", [{}, {"answer": None}, {"answer": 1.5}, {"answer": True}, {"answer": [None]}])
def test_an_answer_that_is_no_text_is_bad_data(data: dict) -> None:
    for score in (exact.score_text, exact.score_integer):
        with pytest.raises(BadDataError, match="data needs a text `answer`"):
            scored(score, "1", data)


def test_addition_needs_an_integer_answer() -> None:
    with pytest.raises(BadDataError, match=r"'1\.5' is not an integer"):
        scored(exact.score_integer, "1", {"answer": "1.5"})
    assert scored(exact.score_integer, "7", {"answer": 7}) == 1.0


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
    assert [scored(exact.score_text, text, {"answer": ["a", "b", 3]}) for text in ("a", "b", "3", "c")] == [1, 1, 1, 0]
    assert [scored(exact.score_integer, text, {"answer": ["07", 8]}) for text in ("7", "8", "9")] == [1, 1, 0]
    for rule in (exact.score_text, exact.score_integer, last_number.score):
        with pytest.raises(BadDataError, match="an empty list"):
            scored(rule, "1", {"answer": []})
    with pytest.raises(BadDataError, match="is not an integer"):
        scored(exact.score_integer, "6", {"answer": ["five", 7]})
    assert scored(exact.score_integer, "7", {"answer": ["five", 7]}) == 1.0


@given(st.text(alphabet="0123456789+-*/() .e_", max_size=40) | st.text(max_size=40))
def test_no_text_makes_a_reward_raise_or_take_another_value(text: str) -> None:
    assert scored(last_number.score, text, {"answer": "24"}) in (0.0, 1.0)
    assert scored(exact.score_integer, text, {"answer": "24"}) in (0.0, 1.0)


# ---- Kinds `length` and `format`, the settings of all kinds of this package, and what their versions depend on ------


SPECS = TypeAdapter[AnyScorerSpec](AnyScorerSpec)
TOOLS = Tools(pool=None, models=None, item_timeout_s=1.0)  # type: ignore[arg-type]  # nothing is started here


def test_length_counts_characters() -> None:
    params = params_of(LengthSpec(kind="length", max_length=4))
    responses = ("", "four", "fives", "fou\u0301r")  # code points
    assert [length.score(Item(prompt="", response=text), params) for text in responses] == [1.0, 1.0, 0.0, 0.0]


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
        (exact, {"kind": "exact"}, {"compare": "integer"}),
        (last_number, {"kind": "last_number"}, {"field": "gold"}),
        (math, {"kind": "math"}, {"extract": "anywhere"}),
        (format, {"kind": "format", "pattern": "x"}, {"pattern": "y"}),
        (length, {"kind": "length", "max_length": 5}, {"max_length": 6}),
    ],
)
def test_a_version_is_that_of_the_settings(kind: object, spec: dict, other: dict) -> None:
    def version(**more: object) -> str:
        return kind.build(SPECS.validate_python({**spec, **more}), TOOLS).version  # type: ignore[attr-defined]

    assert version() == version(weight=2.0, gate=0.5, timeout_s=9.0, name="part", cache=False)
    assert version() != version(**other)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "exact"},
        {"kind": "exact", "compare": "integer", "field": "gold"},
        {"kind": "last_number", "field": "gold"},
        {"kind": "length", "max_length": 0},
    ],
)
async def test_an_inline_scorer_scores_its_example(spec: dict) -> None:
    kinds = {"exact": exact, "last_number": last_number, "length": length}
    scorer = kinds[spec["kind"]].build(SPECS.validate_python(spec), TOOLS)
    await scorer.start()
    assert scorer.health() == "ok"
