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


def test_a_large_power_of_ten_costs_no_memory(url: str) -> None:
    assert boxed(url, "1e999999999", "10^{999999999}", "1e999999998", "7") == [1.0, 0.0, 0.0]
    assert boxed(url, "7", "1e999999999", "1e-999999999", "x = 1e99999999") == [0.0] * 3


def test_what_the_answer_causes_is_wrong(url: str) -> None:
    assert graded(url, (UNREADABLE, "x+1"), (LONG, "x+1"), (SLOW, "4")) == [0.0, 0.0, 0.0]
    text = httpx2.get(f"{url}/metrics", timeout=60).text
    for reason in ("ambiguous", "too_long"):
        assert f'tba_reward_scores_total{{result="{reason}",scorer="math",task="math"}}' in text
    assert graded(url, ("x" * 40, None), task="endless") == [0.0]


def test_what_the_gold_answer_causes_stays_unknown(url: str) -> None:
    assert boxed(url, r"\frac{1}{}", "x+1", r"\frac{2}{}") == ["bad_data", "bad_data"]
    assert boxed(url, "9^{9^{9^{9}}} + \\sqrt{2}", "x+1") == ["bad_data"]
    assert graded(url, (LONG, None), (LONG, "the answer is 4")) == ["bad_data", "bad_data"]


def test_reasoning_that_never_ends_holds_no_answer(url: str) -> None:
    cut, ended = r"<think>so \boxed{42}", r"<think>or 41</think>\boxed{42}"
    assert graded(url, (cut, "42"), (f"a</think>b{cut}", "42"), (ended, "42")) == [0.0, 0.0, 1.0]
    assert graded(url, (r"so \boxed{42}", "42"), (ended, "42"), prompt="Q?<think>\n") == [0.0, 1.0]
    assert graded(url, (r"[THINK]\boxed{42}", "42"), (r"[THINK]a[/THINK]\boxed{42}", "42")) == [0.0, 1.0]
    assert graded(url, ("<think>the answer is 42", "42"), ("<think>41</think>42", "42"), task="gsm8k") == [0.0, 1.0]


def test_a_stop_string_may_have_ended_the_answer_element(url: str) -> None:
    cut = ("so <answer>84", "84")
    assert graded(url, cut) == [0.0]
    assert graded(url, cut, finish_reason="stop_string") == [1.0]


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
