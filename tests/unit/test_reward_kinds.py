"""Kinds `length` and `format`, the settings of all kinds of this package, and what their versions depend on."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError
from tba_reward.scorer import Item, params_of
from tba_reward.scorers import Tools, exact, format, last_number, length, make_n, math

from tba.config.reward import AnyScorerSpec, FormatSpec, LengthSpec

SPECS = TypeAdapter[AnyScorerSpec](AnyScorerSpec)
TOOLS = Tools(pool=None, models=None, item_timeout_s=1.0)  # type: ignore[arg-type]  # nothing is started here


def lengths(spec: dict, *responses: str) -> list[float]:
    params = params_of(LengthSpec(kind="length", **spec))
    return [length.score(Item(prompt="", response=response), params) for response in responses]


def test_length_counts_characters_or_words() -> None:
    assert lengths({"max_length": 4}, "", "four", "fives") == [1.0, 1.0, 0.0]
    assert lengths({"min_length": 2, "max_length": 3, "unit": "words"}, "one", "a  b", "a b\nc", "a b c d") == [
        0,
        1,
        1,
        0,
    ]
    assert lengths({"max_length": 2}, "ab", "é\u0301x") == [1.0, 0.0]  # code points


def test_length_falls_over_the_soft_part() -> None:
    assert lengths({"max_length": 10, "soft_length": 4}, "x" * 10, "x" * 11, "x" * 13, "x" * 14, "x" * 99) == [
        1.0,
        0.75,
        0.25,
        0.0,
        0.0,
    ]
    assert lengths({"min_length": 4, "soft_length": 2}, "xxxx", "xxx", "xx", "") == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("pattern", "full", "response", "score"),
    [
        (r"<answer>\d+</answer>", False, "so <answer>42</answer>!", 1.0),
        (r"<answer>\d+</answer>", True, "so <answer>42</answer>!", 0.0),
        (r"(?s)<think>.*</think>\s*\d+", True, "<think>a\nb</think>\n42", 1.0),
        (r"<think>.*</think>\s*\d+", True, "<think>a\nb</think>\n42", 0.0),
        (r"(?i)yes", False, "YES", 1.0),
        ("", False, "anything", 1.0),
    ],
)
def test_format_matches_a_pattern(pattern: str, full: bool, response: str, score: float) -> None:
    params = params_of(FormatSpec(kind="format", pattern=pattern, full=full))
    assert format.score(Item(prompt="", response=response), params) == score


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"kind": "format", "pattern": "("}, "is not a regular expression"),
        ({"kind": "length"}, "bounds nothing"),
        ({"kind": "length", "min_length": 5, "max_length": 4}, "below min_length"),
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
        (length, {"kind": "length", "max_length": 5}, {"unit": "words"}),
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
        {"kind": "make_n"},
        {"kind": "length", "min_length": 1000},
        {"kind": "length", "min_length": 1000, "unit": "words", "max_length": 1000},
        {"kind": "length", "max_length": 0},
    ],
)
async def test_an_inline_scorer_scores_its_example(spec: dict) -> None:
    kinds = {"exact": exact, "last_number": last_number, "make_n": make_n, "length": length}
    scorer = kinds[spec["kind"]].build(SPECS.validate_python(spec), TOOLS)
    await scorer.start()
    assert scorer.health() == "ok"
