"""Two evaluations side by side: which pairs stand first, and the paired difference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tba.api import Prompt
from tba.config.evaluation import EvalSection
from tba_cli.reports.answers import AnswerComparison, compare, comparison_lines

NAMES = ("same", "text", "better", "unknown", "worse", "refused")
PROMPTS = [Prompt(prompt_id=one, task="exact", text=f"{one}?", data={"answer": one}, split="heldout") for one in NAMES]
GREEDY_BEFORE = [("same", "a", 1.0), ("text", "a", 0.0), ("better", "a", 0.25), ("unknown", "a", 1.0)]
GREEDY_BEFORE += [("worse", "a", 1.0)]
GREEDY_AFTER = [("same", "a", 1.0), ("text", "\x1b[2J", 0.0), ("better", "b", 1.0), ("unknown", "a", None)]
GREEDY_AFTER += [("worse", "b", 0.75)]


def line(prompt_id: str, text: str, reward: float | None, *, mode: str = "greedy") -> dict[str, Any]:
    unknown = {"exact": "timeout"} if reward is None else {}
    return {"mode": mode, "prompt_id": prompt_id, "text": text, "scores": {"exact": reward}, "unknown": unknown}


BEFORE = [*(line(*one) for one in GREEDY_BEFORE), line("better", "sampled", 1.0, mode="sampled")]
AFTER = [*(line(*one) for one in GREEDY_AFTER), line("better", "sampled", 0.0, mode="sampled")]


def compared(tmp_path: Path, **published: Any) -> AnswerComparison:
    folders = (tmp_path / "a", tmp_path / "b")
    for folder, lines in zip(folders, (BEFORE, AFTER), strict=True):
        folder.mkdir(parents=True)
        (folder / "completions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    section = EvalSection.model_validate({"success_reward": 0.5, "published": published})
    return compare(section, PROMPTS, folders, run="r", versions=("0-0", "1-40"))


def test_what_changed_stands_first_and_differences_are_of_each_prompt(tmp_path: Path) -> None:
    found = compared(tmp_path)
    # a reward that became unknown is not a worse one
    assert [pair.prompt_id for pair in found.pairs] == ["worse", "text", "unknown", "better", "same", "refused"]
    assert (found.num_changed, found.mode) == (4, "greedy")
    success, reward = found.differences
    assert (success.what, reward.what) == ("success rate (>= 0.5)", "mean reward")
    assert (success.before.value, success.after.value) == (3 / 5, 3 / 4)
    changes = [0.0, 0.0, 0.75, -0.25]  # of the prompts that are known under both
    mean = sum(changes) / 4
    assert reward.difference.value == pytest.approx(mean)
    spread = math.sqrt(sum((change - mean) ** 2 for change in changes) / 3 / 4)
    assert reward.difference.stderr == pytest.approx(spread)
    assert (reward.num_better, reward.num_worse, reward.num_same, reward.num_unknown) == (1, 1, 2, 2)


def test_people_see_both_answers_and_how_many_are_left_out(tmp_path: Path) -> None:
    lines = comparison_lines(compared(tmp_path), limit=4)
    assert lines[0] == "worse: 'worse?'  gold data {'answer': 'worse'}"
    assert lines[1:3] == ["  0-0   reward 1: 'a'", "  1-40  reward 0.75: 'b'"]
    assert "  1-40  reward unknown (timeout): 'a'" in lines
    assert "\x1b" not in "".join(lines)
    assert lines[12] == "greedy answers of 0-0 and 1-40 to 6 held-out prompts: 4 changed, 4 are shown (--limit)"
    assert lines[13].startswith("exact: success rate (>= 0.5) 0.6000 -> 0.7500, difference +0.2500 ± ")
    assert lines[13].endswith("; 1 prompts better, 0 worse, 3 the same, 2 unknown")
    assert "no answer: the engine refused" in "".join(comparison_lines(compared(tmp_path / "again"), limit=6))


def test_samples_are_compared_where_there_are_no_greedy_answers(tmp_path: Path) -> None:
    found = compared(tmp_path, greedy=False, num_samples=1)
    assert found.mode == "sampled"
    assert [pair.prompt_id for pair in found.pairs if pair.before] == ["better"]
    assert found.differences[0].difference.value == -1.0
