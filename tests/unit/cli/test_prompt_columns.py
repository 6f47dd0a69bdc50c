"""Foreign data sets: which column is what, stable ids, and what is held out."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tba.api import Prompt
from tba.config.data import ColumnValue
from tba.errors import ConfigError
from tba_cli.main import main
from tba_cli.prompts.columns import Columns, RowError, SplitRule, TextColumn, TextTemplate
from tba_cli.prompts.reader import PromptReader
from tba_cli.prompts.sources import open_file

ROW = {"question": "What is 2 + 2?", "answer": "4", "level": 3, "tags": ["sum", {"hard": False}]}


def columns(**changes: Any) -> Columns:
    values: dict[str, Any] = {"task": "math", "text": TextColumn("question"), "data": {"gold": "answer"}}
    values = {**values, **changes}
    return Columns(**{**values, "data": {key: ColumnValue(column=name) for key, name in values["data"].items()}})


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def questions(num: int) -> list[dict]:
    return [{"question": f"What is {i}?", "answer": str(i), "uid": i} for i in range(num)]


def read(path: Path, columns: Columns, rule: SplitRule | None = None) -> list[Prompt]:
    return list(PromptReader(open_file(path), columns, rule))


def test_a_row_of_another_shape_becomes_a_prompt():
    prompt = columns(data={"gold": "answer", "tags": "tags"}).prompt(ROW)
    assert (prompt.task, prompt.text, prompt.split) == ("math", ROW["question"], "train")
    assert prompt.data == {"gold": "4", "tags": ROW["tags"]}


def test_the_id_depends_on_the_content_and_on_nothing_else():
    prompt_id = columns().prompt(ROW).prompt_id
    assert prompt_id == "math-346157ac4bd69c5bc9bd"  # pinned: an upload of tomorrow must know the prompts of today
    assert columns().prompt(dict(reversed(ROW.items()))).prompt_id == prompt_id
    assert columns().prompt(ROW | {"level": 4}).prompt_id == prompt_id
    for other in (ROW | {"question": "What is 2 + 3?"}, ROW | {"answer": "5"}):
        assert columns().prompt(other).prompt_id != prompt_id
    assert columns(task="sums").prompt(ROW).prompt_id.startswith("sums-")


def test_an_id_column_may_hold_numbers():
    assert columns(id_column="level").prompt(ROW).prompt_id == "3"


def test_a_template_names_columns_and_keeps_braces():
    template = TextTemplate("Level {level}. {question}\nAnswer in \\boxed{{}}: {question}")
    assert template.columns == ["level", "question"]
    assert template.text_of(ROW) == "Level 3. What is 2 + 2?\nAnswer in \\boxed{}: What is 2 + 2?"
    assert columns(text=template).names == ["level", "question", "answer"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no column", "names no column"),
        ("{question", "expected '}'"),
        ("{}", "a column is named as"),
        ("{question!r}", "without formatting"),
        ("{level:>10}", "without formatting"),
    ],
)
def test_a_template_that_is_none_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        TextTemplate(template)


def test_a_template_reaches_no_attribute_of_a_value():
    with pytest.raises(RowError, match=r"column 'question\.__class__' is missing"):
        TextTemplate("{question.__class__}").text_of(ROW)


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({}, {"answer": "4"}, "column 'question' is missing; this row has answer"),
        ({}, ROW | {"question": 7}, "column 'question': 7 is not text"),
        ({}, ROW | {"question": None}, "column 'question': None is not text"),
        ({}, ROW | {"question": ""}, "text: '': String should have at least 1 character"),
        ({}, ROW | {"answer": float("nan")}, r"data: \{'gold': nan\}: "),
        ({"text": TextTemplate("{tags}")}, ROW, "column 'tags': .* is neither text nor a number"),
        (
            {"id_column": "question"},
            ROW | {"question": "q" * 300},
            r"prompt_id: 'qqq.*\.\.\.: String should",
        ),
        ({}, ROW | {"answer": datetime.date(2024, 1, 2)}, r"column 'answer': datetime.* \(date\) is not JSON"),
        ({}, ROW | {"answer": [{"x": {1: 2}}]}, "column 'answer': the key 1 is not text"),
    ],
)
def test_a_row_that_cannot_be_a_prompt_is_refused_with_column_and_value(changes, row, message):
    with pytest.raises(RowError, match=message):
        columns(**changes).prompt(row)


def test_the_same_content_twice_is_one_prompt_but_the_same_id_twice_is_an_error(tmp_path):
    path = write(tmp_path / "q.jsonl", [*questions(3), *questions(2)])
    reader = PromptReader(open_file(path), columns())
    assert (len(list(reader)), reader.num_repeated) == (3, 2)
    assert (len(list(reader)), reader.num_repeated) == (3, 2)
    with pytest.raises(ConfigError, match=r"q\.jsonl, line 4: prompt_id '0' appears twice"):
        read(path, columns(id_column="uid"))


def test_what_is_held_out_depends_on_the_ids_alone(tmp_path):
    rows = questions(400)
    shuffled = random.Random(0).sample(rows, len(rows))
    for rule in (SplitRule(heldout_every=4), SplitRule(num_heldout=100)):
        held_out = {
            p.prompt_id for p in read(write(tmp_path / "a.jsonl", rows), columns(), rule) if p.split == "heldout"
        }
        again = {
            p.prompt_id for p in read(write(tmp_path / "b.jsonl", shuffled), columns(), rule) if p.split == "heldout"
        }
        assert held_out == again
        assert len(held_out) == 100 if rule.num_heldout else 70 < len(held_out) < 130
    more = read(write(tmp_path / "c.jsonl", questions(500)), columns(), SplitRule(heldout_every=4))
    before = read(write(tmp_path / "a.jsonl", rows), columns(), SplitRule(heldout_every=4))
    assert more[:400] == before  # a data set that grows moves no prompt from one split to the other
    assert {p.split for p in read(tmp_path / "a.jsonl", columns(), SplitRule("heldout"))} == {"heldout"}


def test_holding_out_everything_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="num_heldout 5 of 5 prompts leaves none to train on"):
        read(write(tmp_path / "q.jsonl", questions(5)), columns(), SplitRule(num_heldout=5))


# ---- the command ----------------------------------------------------------------------------------------------------


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["prompts", "upload", *words, "--dry-run"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_dry_run_shows_three_prompts_and_counts_and_needs_no_service(tmp_path, capsys):
    path = str(write(tmp_path / "q.jsonl", [*questions(10), *questions(1)]))
    flags = ("--task", "math", "--text-template", "Q: {question}\nA:", "--data", "gold=answer", "--num-heldout", "4")
    code, out, _ = dry_run(capsys, path, *flags)
    assert code == 0
    assert out.count('"prompt_id": "math-') == 3
    assert '"text": "Q: What is 0?\\nA:"' in out
    assert "6 prompts to train on and 4 held out (1 repeated rows are left out); nothing was uploaded" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "math"], "need --task NAME and --text COLUMN"),
        (["--text", "question"], "need --task NAME and --text COLUMN"),
        (["--split", "heldout"], "its rows say their own split"),
        (["--task", "m", "--text", "question", "--data", "gold"], "--data 'gold' is not KEY=COLUMN"),
        (["--task", "m", "--text", "question", "--data", "a=x", "--data", "a=y"], "names the key 'a' twice"),
        (["--task", "m", "--text", "question", "--heldout-every", "1"], "--heldout-every 1 is too small"),
        (["--task", "m", "--text", "question", "--num-heldout", "0"], "--num-heldout 0 is too small"),
        (["--task", "m", "--text", "nothing"], "line 1: column 'nothing' is missing; this row has question"),
        ([], "line 1: prompt_id: Field required"),
    ],
)
def test_wrong_flags_are_one_sentence(tmp_path, capsys, flags, message):
    code, out, err = dry_run(capsys, str(write(tmp_path / "q.jsonl", questions(10))), *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
