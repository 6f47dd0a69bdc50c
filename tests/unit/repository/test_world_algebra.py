"""Algebra in five levels: every answer is that of its problem, the scorer `math` reads it, and splits are apart."""

import math
import re
from collections import defaultdict
from fractions import Fraction
from itertools import cycle

import pytest
from tba_reward.math.extraction import boxed_answer
from tba_reward.math.grader import score
from tba_reward.scorer import Item, params_of

from examples.worlds.math.algebra import FAMILIES, SIZES, TABLES
from tba.config.reward import MathSpec

PARAMS = params_of(MathSpec(kind="math"))
POINTS = [Fraction(n, 2) for n in range(-50, 51)]


@pytest.fixture(scope="module")
def tables():
    return {split: make(0) for split, make in TABLES.items()}


def answer_of(solution: str) -> str:
    found = boxed_answer(solution)
    assert found is not None
    return found


def reward(gold: str, answer: str) -> float:
    found = score(Item(prompt="", response=rf"so $\boxed{{{answer}}}$.", data={"answer": gold}), PARAMS)
    assert isinstance(found, float)
    return found


def python(text: str) -> str:
    """Turn the formula of a problem into an expression of Python."""
    text = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"Fraction(\1, \2)", text)
    text = re.sub(r"\|(.*?)\|", r"abs(\1)", text.replace("^2", "**2"))
    text = re.sub(r"(?<=[0-9)])(?=[xy(])", "*", text)
    return text.replace(r"\le", "<=").replace(r"\ge", ">=")


def number(text: str) -> Fraction:
    return Fraction(eval(python(text), {"Fraction": Fraction}))


def members(answer: str) -> set[Fraction]:
    """Return which of the points are in a number, set, interval or union."""
    if answer.startswith(r"\{"):
        return {number(part) for part in answer.removeprefix(r"\{").removesuffix(r"\}").split(",")}
    found = set()
    for part in answer.split(r"\cup"):
        low, high = part[1:-1].split(",")
        found |= {
            point
            for point in POINTS
            if (low == r"-\infty" or point > number(low) or (point == number(low) and part[0] == "["))
            and (high == r"\infty" or point < number(high) or (point == number(high) and part[-1] == "]"))
        }
    return found


def solutions(formula: str) -> set[Fraction]:
    """Return the points for which a formula holds, or where it is 0."""
    formula = python(formula)
    if "<" not in formula and ">" not in formula:
        formula = formula.replace("=", "==") if "=" in formula else f"{formula} == 0"
    holds = compile(formula, "<problem>", "eval")
    return {point for point in POINTS if eval(holds, {"x": point})}


def is_right(family: str, problem: str, answer: str) -> bool:
    formula = re.findall(r"\$([^$]+)\$", problem)
    if family in ("sum", "fractions"):
        return number(answer) == number(formula[0])
    return ({number(answer)} if family == "linear" else members(answer)) == solutions(formula[0])


@pytest.mark.parametrize("split", ["test", "train"])
def test_every_answer_is_the_one_that_the_problem_asks_for(tables, split):
    for family, each in zip(cycle(FAMILIES), tables[split][:300], strict=False):
        answer = answer_of(each["solution"])
        assert is_right(family.name, each["problem"], answer), each
        assert each["level"] == f"Level {family.level}"
        for top, bottom in re.findall(r"\\frac\{(\d+)\}\{(\d+)\}", answer):
            assert math.gcd(int(top), int(bottom)) == 1


def test_every_answer_grades_as_right_and_the_next_one_as_wrong(tables):
    answers = {answer_of(each["solution"]) for each in tables["validation"]}
    assert len(answers) > 30
    for answer in answers:
        assert reward(answer, answer) == 1.0
        assert reward(answer, re.sub(r"\d+", lambda digits: str(int(digits[0]) + 1), answer, count=1)) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        (r"\frac{2}{3}", "2/3", 1.0),
        (r"\frac{2}{3}", r"\frac{4}{6}", 1.0),
        (r"-\frac{2}{3}", r"\frac{-2}{3}", 1.0),
        (r"-\frac{2}{3}", r"\frac{2}{3}", 0.0),
        (r"\{-2,5\}", r"\{5,-2\}", 1.0),
        (r"\{-2,5\}", r"\{2,5\}", 0.0),
        (r"\{-2,5\}", r"\{5\}", 0.0),
        ("(-5,2)", "(2,-5)", 0.0),
        (r"(-\infty,4]", r"(-\infty, 4]", 1.0),
        (r"(-\infty,4]", r"(-\infty,4)", 0.0),
        (r"(-\infty,4]", r"[4,\infty)", 0.0),
        (r"(-\infty,-4)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,-4)", 1.0),
        (r"(-\infty,-4)\cup(1,\infty)", r"(-\infty,-4]\cup[1,\infty)", 0.0),
        ("[-4,1]", "(-4,1)", 0.0),
    ],
)
def test_equivalent_answers_are_right_and_others_wrong(gold, answer, expected):
    assert reward(gold, answer) == expected


def test_pupils_err_the_more_the_higher_the_level(tables):
    right: dict[int, list[bool]] = defaultdict(list)
    for family, each in zip(cycle(FAMILIES), tables["sft"][:1500], strict=False):
        right[family.level].append(is_right(family.name, each["problem"], answer_of(each["solution"])))
    shares = [sum(right[level]) / len(right[level]) for level in sorted(right)]
    assert shares == sorted(shares, reverse=True)
    assert 0.7 < shares[0] < 0.9
    assert 0.2 < shares[4] < 0.35


def test_no_problem_is_in_two_splits_and_tests_are_the_same_for_every_seed(tables):
    seen: dict[str, str] = {}
    for split, rows in tables.items():
        assert len(rows) == SIZES[split]
        for each in rows:
            assert seen.setdefault(each["problem"], split) == split
    for split in ("test", "validation"):
        assert TABLES[split](1) == tables[split]
        assert len({each["problem"] for each in tables[split]}) == SIZES[split]
    assert TABLES["train"](1) != tables["train"]
    assert TABLES["train"](0) == tables["train"]
