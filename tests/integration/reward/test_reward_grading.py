"""Grading of answers over POST /v1/score of the real service: cases of foreign graders, and similar ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.reward_process import running_reward

MATH = {"kind": "math", "timeout_s": 2.0}
TASKS = {
    "math": {"scorers": [MATH]},
    "unknown": {"scorers": [{**MATH, "unreadable": "unknown"}]},
    "minus": {"scorers": [{**MATH, "unreadable": -1.0}]},
    "endless": {"scorers": [{"kind": "format", "pattern": "(x+x+)+y", "timeout_s": 0.5}]},
}
SLOW = r"\boxed{9^{9^{9^{9}}} + \sqrt{2}}"
UNREADABLE = r"\boxed{\frac{1}{}}"
LONG = r"\boxed{" + "1+" * 1500 + "1}"
Graded = float | str


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_reward(tmp_path_factory.mktemp("grading"), num_workers=2, tasks=TASKS) as url:
        yield url


def graded(url: str, *items: tuple[str, Any], task: str = "math", **fields: Any) -> list[Graded]:
    """Return the reward of each response to a gold answer, or the reason why there is none."""
    body = [
        {"item_id": str(at), "task": task, "prompt": "", "response": response, "data": {"answer": gold}, **fields}
        for at, (response, gold) in enumerate(items)
    ]
    reply = httpx2.post(f"{url}/v1/score", json={"items": body}, timeout=120)
    assert reply.status_code == 200
    results = reply.json()["results"]
    return [result["reward"] if result["error"] is None else result["error"]["reason"] for result in results]


def boxed(url: str, gold: Any, *answers: str, task: str = "math") -> list[Graded]:
    return graded(url, *((rf"so it is \boxed{{{answer}}}.", gold) for answer in answers), task=task)


def test_a_gold_answer_that_is_a_json_number_is_that_number(url: str) -> None:
    assert boxed(url, 1e-07, r"10^{-7}", r"1\times 10^{-7}", "0.0000001", "1e-7", "1E-07") == [1.0] * 5
    assert boxed(url, 1e-07, "e-7", "e - 7", "0", "-4.28") == [0.0] * 4
    assert boxed(url, 1e22, "10^{22}", "1" + "0" * 22, "10^{21}") == [1.0, 1.0, 0.0]
    assert boxed(url, 2 / 3, r"\frac23", r"\frac34") == [1.0, 0.0]
    assert boxed(url, 0.1 + 0.2, "0.3", "0.31") == [1.0, 0.0]


def test_e_notation_is_a_power_of_ten_and_costs_no_memory(url: str) -> None:
    same = [r"4.5\times10^{33}", r"4.5 \cdot 10^{33}", "4.5E+33", "4.5 × 10^33", "4.5×10³³", r"45\times 10^{32}"]
    assert boxed(url, "4.5e33", *same, "45" + "0" * 32, r"4.5\times 10^{33}\text{ erg/s}") == [1.0] * 8
    assert boxed(url, "4.5e33", r"4.5\times10^{32}", "4.5", "4.5e", r"4.5 e^{33}") == [0.0] * 4
    assert boxed(url, "1e999999999", "10^{999999999}", "1e999999998", "7") == [1.0, 0.0, 0.0]
    assert boxed(url, "7", "1e999999999", "1e-999999999", "x = 1e99999999") == [0.0] * 3
    assert boxed(url, r"\sqrt{2}\times 10^{5}", r"1e5\sqrt{2}", r"1e4\sqrt{2}") == [1.0, 0.0]
    assert boxed(url, "1e-7", "x = 10^{-7}", "x = 2e-7") == [1.0, 0.0]
    assert boxed(url, "e^2", "e^{2}", "2e") == [1.0, 0.0]


def test_what_the_answer_causes_is_wrong_unless_the_recipe_says_otherwise(url: str) -> None:
    reasons = ["ambiguous", "too_long"]
    items = [(UNREADABLE, "x+1"), (LONG, "x+1")]
    assert graded(url, *items) == [0.0, 0.0]
    assert graded(url, *items, task="minus") == [-1.0, -1.0]
    assert graded(url, *items, task="unknown") == reasons
    (slow,) = graded(url, (SLOW, "4"), task="unknown")
    assert slow in ("too_slow", "out_of_memory")
    assert graded(url, (SLOW, "4")) == [0.0]
    assert graded(url, ("x" * 40, None), task="endless") == [0.0]


def test_what_the_gold_answer_causes_stays_unknown(url: str) -> None:
    assert boxed(url, r"\frac{1}{}", "x+1", r"\frac{2}{}") == ["bad_data", "bad_data"]
    assert boxed(url, "9^{9^{9^{9}}} + \\sqrt{2}", "x+1") == ["bad_data"]
    assert graded(url, (LONG, None), (LONG, "the answer is 4")) == ["bad_data", "bad_data"]


def test_zeros_by_cancellation_are_zeros(url: str) -> None:
    zeros = ["x^2-x^2", r"\sin^2x+\cos^2x-1", r"\sqrt{8}-2\sqrt{2}", "(x+1)^2-x^2-2x-1", "0.1+0.2-0.3", "0.5x-0.5x"]
    assert boxed(url, "0", *zeros) == [1.0] * len(zeros)
    assert boxed(url, r"\sin^2x+\cos^2x-1", "0", "x-x", "1") == [1.0, 1.0, 0.0]
    others = [r"\sin^2x+\cos^2x", "x^2-x", r"10^{-20}\pi", r"\frac{\pi}{2004!}", r"\sqrt{8}-2\sqrt{2.1}"]
    assert boxed(url, "0", *others) == [0.0] * len(others)


def test_reasoning_that_never_ends_holds_no_answer(url: str) -> None:
    cut, ended = r"<think>so \boxed{42}", r"<think>or 41</think>\boxed{42}"
    assert graded(url, (cut, "42"), (f"a</think>b{cut}", "42"), (ended, "42")) == [0.0, 0.0, 1.0]
    assert graded(url, (r"so \boxed{42}", "42"), (ended, "42"), prompt="Q?<think>\n") == [0.0, 1.0]
    assert graded(url, (r"[THINK]\boxed{42}", "42"), (r"[THINK]a[/THINK]\boxed{42}", "42")) == [0.0, 1.0]
    assert graded(url, ("<think>the answer is 42", "42"), ("<think>41</think>42", "42"), task="gsm8k") == [0.0, 1.0]


def test_an_answer_may_stand_in_an_answer_element(url: str) -> None:
    right = ["<answer>84</answer>", "<think>a</think>\n<answer> $84$ </answer> bye", r"<answer>\boxed{84}</answer>"]
    right += [
        "<answer>83</answer> no <answer>84</answer>",
        r"<answer>83</answer> \boxed{84}",
        r"\boxed{1}<answer>84</answer>",
    ]
    assert graded(url, *((text, "84") for text in right)) == [1.0] * len(right)
    wrong = [
        "<answer>85</answer>",
        "<answer>84",
        "<answer>84 or 85</answer>",
        "<answer>It is 84</answer>",
        "<answer></answer>",
    ]
    wrong += [r"<answer>84</answer> \boxed{85}", r"\boxed{84}<answer>85</answer>", "<think><answer>84</answer>"]
    assert graded(url, *((text, "84") for text in wrong)) == [0.0] * len(wrong)
    assert graded(url, ("so <answer>84", "84"), finish_reason="stop_string") == [1.0]


def test_a_unit_is_a_unit_by_a_table_and_prose_is_none(url: str) -> None:
    prose = [
        r"4 \text{ is wrong}",
        r"\text{4 or five}",
        "4 is wrong",
        r"\text{not } 4",
        r"4\text{ not}",
        r"4 \mathrm{ is wrong}",
    ]
    prose += [
        r"4 \text{ fox}",
        r"4 \textbf{ is not it}",
        r"4^{\text{wrong}}",
        "4 dozen",
        "4 squared",
        "4m",
        "4 s",
        "4 widgets",
    ]
    assert boxed(url, "4", *prose) == [0.0] * len(prose)
    units = [
        "4 people",
        "4 dollars",
        "4 km/h",
        r"4\text{ m/s}^2",
        r"4\ \mathrm{cm}",
        r"4\,\frac{\text{km}}{\text{h}}",
        "4 cm^2",
    ]
    units += [
        "€4",
        "4 €",
        r"\$4.00",
        "£4",
        "USD 4",
        "4°",
        r"4^\circ\text{C}",
        r"\text{4 people}",
        r"x = 4\text{ cm}",
        "４",
    ]
    assert boxed(url, "4", *units) == [1.0] * len(units)
    assert boxed(url, "4 km/h", "4", "5", r"4\text{ km/h}") == [1.0, 0.0, 1.0]
    assert boxed(url, r"4\text{ widgets}", "4", "4 widgets", "4 gadgets") == [1.0, 1.0, 0.0]
    assert boxed(url, "4m", "4", "4m") == [0.0, 1.0], "a variable is no unit"


def test_numbers_as_they_are_typed(url: str) -> None:
    assert boxed(url, "1000", "1 000", r"1\ 000", "1\u202f000", "1,000", "1 0") == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert boxed(url, "0.5", "½", r"\frac12", "50%", "⅓") == [1.0, 1.0, 1.0, 0.0]
    assert boxed(url, "90", "90°", "90^\\circ", "89°") == [1.0, 1.0, 0.0]
    assert boxed(url, "-2.5", "−2½", "–2.5", "-2.5", "2.5") == [1.0, 1.0, 1.0, 0.0]
    assert boxed(url, r"2\sqrt{3}", "2√3", "2√2") == [1.0, 0.0]


def test_a_gold_answer_in_prose_is_bad_data(url: str) -> None:
    prose = ["The answer is 42", "She has 5 apples left.", "48/2 = <<48/2=24>>24 clips in May.\n#### 72"]
    prose.append("it grows without any bound on the whole real line because its derivative is positive everywhere")
    assert [boxed(url, gold, "42", "5")[0] for gold in prose] == ["bad_data"] * len(prose)
    assert boxed(url, "no solution", "no solution", "5") == [1.0, 0.0]
    assert boxed(url, "5 apples", "5", "6") == [1.0, 0.0]


def test_a_list_of_gold_answers_holds_right_ones_only(url: str) -> None:
    assert boxed(url, ["42", 43, "x+1"], "42", "43", "1+x", "44") == [1.0, 1.0, 1.0, 0.0]
    assert boxed(url, ["42", "The answer is 41"], "42", "43") == [1.0, "bad_data"]
    assert boxed(url, [], "42") == ["bad_data"]
    items = [("so 7", "+7"), ("so 7", ["6", "7"]), ("so 8", ["6", "7"]), ("so 8", ["six", "7"])]
    assert graded(url, *items, task="gsm8k") == [1.0, 1.0, 0.0, "bad_data"]


def test_a_gold_answer_of_one_short_word_is_an_answer(url: str) -> None:
    for gold, other in (("No", "Yes"), ("no", "yes"), ("not", "or")):
        assert boxed(url, gold, gold, other) == [1.0, 0.0]
    assert boxed(url, "Yes", "Yes", "No") == [1.0, 0.0]
    assert boxed(url, "it is what it is, so we do not know if he or she was right", "4") == ["bad_data"]


def test_units_of_one_letter_and_rates_are_those_of_the_gold_answer(url: str) -> None:
    assert boxed(url, "5 m", "5", r"5\text{ m}", "6") == [1.0, 1.0, 0.0]
    assert boxed(url, "4", "4 per day", "5 per day") == [1.0, 0.0]
    assert boxed(url, "3 per hour", "3", "4") == [1.0, 0.0]
    assert boxed(url, "10:30 p.m.", "10:30 pm", "10:30 am") == [1.0, 0.0]


def test_a_gold_answer_whose_value_takes_too_long_is_no_fault_of_the_answer(url: str) -> None:
    assert boxed(url, r"\sum_{n=1}^{\infty}\frac{\sin n}{n}", r"\frac{\pi-1}{2}") == ["bad_data"]
