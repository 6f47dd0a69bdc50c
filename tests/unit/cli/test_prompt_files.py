"""Prompt files, and chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tba.api import Prompt
from tba.config import parse_recipe
from tba.errors import ConfigError
from tba_cli.prompts.reader import chunks, prompts_of, prompts_of_file


def prompt(number: int, text: str = "1+1=", split: str = "train") -> dict[str, Any]:
    return {"prompt_id": f"p{number}", "task": "addition", "text": text, "data": {"answer": "2"}, "split": split}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_lines_become_prompts_and_empty_lines_are_skipped(tmp_path):
    prompts = prompts_of_file(write(tmp_path / "p.jsonl", prompt(0), "", prompt(1, split="heldout"), ""))
    assert [(p.prompt_id, p.split) for p in prompts] == [("p0", "train"), ("p1", "heldout")]


def test_a_mark_of_utf8_and_windows_line_ends_are_no_part_of_a_prompt(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(prompt(i)) for i in range(2)).encode() + b"\r\n\r\n")
    assert [p.prompt_id for p in prompts_of_file(path)] == ["p0", "p1"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([prompt(0), "{not json"], "line 2: it is not JSON"),
        (["[1, 2]"], r"line 1: \[1, 2\] is not a JSON object"),
        ([{"prompt_id": "p", "task": "addition"}], "line 1: text: Field required$"),
        ([{"question": "1+1", "answer": "2"}], r"line 1: prompt_id: Field required; .* \[\[data\.sets\]\]"),
        ([prompt(0) | {"text": 7}], "line 1: text: 7: Input should be a valid string"),
        ([prompt(0) | {"answer": 3}], "line 1: answer: 3: Extra inputs are not permitted"),
        ([prompt(0) | {"data": None}], "line 1: data: None"),
        ([prompt(0), prompt(0)], "line 2: prompt_id 'p0' appears twice"),
        (['{"a": ' * 5000], "line 1: it is not JSON: recursion limit"),
        ([], "holds no prompts"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        prompts_of_file(write(tmp_path / "p.jsonl", *lines))


def test_what_is_no_jsonl_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(prompt(0)).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2: it is not UTF-8 text"):
        prompts_of_file(path)
    with pytest.raises(ConfigError, match="No such file"):
        prompts_of_file(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"suffix '\.csv'; give a \.jsonl file"):
        prompts_of_file(tmp_path / "p.csv")


def test_a_run_needs_held_out_prompts(tmp_path):
    path = write(tmp_path / "p.jsonl", prompt(0))
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": str(path)}}
    with pytest.raises(ConfigError, match="no prompt with split 'heldout'"):
        prompts_of(parse_recipe(document, where="test"))


def test_chunks_keep_order_and_stay_below_both_limits():
    prompts = [Prompt.model_validate(prompt(number, text="x" * 100)) for number in range(2500)]
    by_count = list(chunks(prompts, max_chunk_bytes=10**9))
    assert [len(chunk) for chunk in by_count] == [1000, 1000, 500]
    by_size = list(chunks(prompts, max_chunk_bytes=2000))
    assert max(sum(len(p.model_dump_json()) for p in chunk) for chunk in by_size) <= 2000
    assert [p for chunk in by_size for p in chunk] == prompts
    assert [len(chunk) for chunk in chunks(prompts[:3], max_chunk_bytes=10)] == [1, 1, 1], "a larger one travels alone"
