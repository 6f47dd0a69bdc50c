"""Prompt files and chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba.api import Prompt
from tba.config import Recipe, parse_recipe
from tba.errors import ConfigError
from tba.local.prompts import chunks, prompts_of, read_prompts


def prompt(number: int, text: str = "1+1=", split: str = "train") -> dict:
    return {"prompt_id": f"p{number}", "task": "addition", "text": text, "data": {"answer": "2"}, "split": split}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def recipe_for(path: Path) -> Recipe:
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": str(path)}}
    return parse_recipe(document, where="test")


def test_lines_become_prompts_and_empty_lines_are_skipped(tmp_path):
    prompts = read_prompts(write(tmp_path / "p.jsonl", prompt(0), "", prompt(1, split="heldout"), ""))
    assert [(p.prompt_id, p.split) for p in prompts] == [("p0", "train"), ("p1", "heldout")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([prompt(0), "{not json"], "line 2"),
        ([{"prompt_id": "p", "task": "addition"}], "line 1: text"),
        ([prompt(0) | {"answer": 3}], "line 1: answer"),
        ([prompt(0), prompt(0)], "line 2: prompt_id 'p0' appears twice"),
        ([], "holds no prompts"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        read_prompts(write(tmp_path / "p.jsonl", *lines))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")


def test_a_run_needs_held_out_prompts(tmp_path):
    with pytest.raises(ConfigError, match="no prompt with split 'heldout'"):
        prompts_of(recipe_for(write(tmp_path / "p.jsonl", prompt(0))))


def test_chunks_keep_order_and_stay_below_both_limits():
    prompts = [Prompt.model_validate(prompt(number, text="x" * 100)) for number in range(2500)]
    by_count = list(chunks(prompts, max_chunk_bytes=10**9))
    assert [len(chunk) for chunk in by_count] == [1000, 1000, 500]
    by_size = list(chunks(prompts, max_chunk_bytes=2000))
    assert max(sum(len(p.model_dump_json()) for p in chunk) for chunk in by_size) <= 2000
    assert [p for chunk in by_size for p in chunk] == prompts


def test_a_prompt_above_the_limit_travels_alone():
    prompts = [Prompt.model_validate(prompt(number, text="x" * 100)) for number in range(3)]
    assert [len(chunk) for chunk in chunks(prompts, max_chunk_bytes=10)] == [1, 1, 1]
