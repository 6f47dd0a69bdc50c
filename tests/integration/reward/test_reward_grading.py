"""Kind `math` in the real service: an answer that hangs costs itself alone; wrong is 0, unknown is not."""

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
ENDLESS = r"\boxed{" + "(" * 200 + "x" + ")" * 200 + "}"
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


def test_what_the_answer_causes_is_wrong_and_costs_no_other_item(url: str) -> None:
    others = [(rf"\boxed{{{n}}}", "4") for n in range(8)]
    found = graded(
        url, (r"\boxed{2x}", "x+x"), (UNREADABLE, "x+1"), (LONG, "x+1"), (SLOW, "4"), (ENDLESS, "4"), *others
    )
    assert found == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    text = httpx2.get(f"{url}/metrics", timeout=60).text
    for reason in ("ambiguous", "too_long"):
        assert f'tba_reward_scores_total{{result="{reason}",scorer="math",task="math"}}' in text
    assert graded(url, ("x" * 40, None), task="endless") == [0.0]


def test_the_recipe_says_what_an_answer_without_a_score_gets(url: str) -> None:
    items = [(UNREADABLE, "x+1"), (LONG, "x+1")]
    assert graded(url, *items, task="minus") == [-1.0, -1.0]
    assert graded(url, *items, task="unknown") == ["ambiguous", "too_long"]
    (slow,) = graded(url, (SLOW, "4"), task="unknown")
    assert slow in ("too_slow", "out_of_memory")


def test_what_the_gold_answer_causes_stays_unknown(url: str) -> None:
    box = r"\boxed{x+1}"
    golds = ["9^{9^{9^{9}}} + \\sqrt{2}", r"\sum_{n=1}^{\infty}\frac{\sin n}{n}"]
    assert graded(url, *((box, gold) for gold in golds)) == ["bad_data", "bad_data"]
    assert graded(url, (LONG, None), (LONG, "the answer is 4")) == ["bad_data", "bad_data"]
