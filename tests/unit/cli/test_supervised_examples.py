"""Examples of supervised training from rows: texts from templates, and errors that name row and column."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tba.config.supervised import RewardTrainingSection, SftSection
from tba.errors import ConfigError
from tba_cli.setup.examples import write_examples

ROWS = [
    {"q": "1+1", "a": 2, "worse": "3", "kind": "good"},
    {"q": "a {b}", "a": "c\nd\u2028", "worse": "e", "kind": "bad"},
]
NEW = {"hidden_size": 8, "num_layers": 1, "num_heads": 1}


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft(dataset: str, **changes: Any) -> SftSection:
    fields = {"prompt": "Q: {q}\n", "response": " {a}", "num_steps": 1, "max_length_tokens": 64}
    return SftSection.model_validate({"new_model": NEW, "dataset": dataset, **fields, **changes})


def reward(dataset: str, **changes: Any) -> RewardTrainingSection:
    fields = {"path": "rm", "prompt": "{q}", "num_steps": 1, "max_length_tokens": 64}
    return RewardTrainingSection.model_validate({"new_model": NEW, "dataset": dataset, **fields, **changes})


PAIRS = {"chosen": "{a}", "rejected": "{worse}"}
LABELS = {"response": "{a}", "label": "kind", "labels": ["good", "bad"]}


def written(item: SftSection | RewardTrainingSection, folder: Path) -> list[dict[str, str]]:
    lines = write_examples(item, "sft.0", folder).train.read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def test_an_example_of_each_form(tmp_path: Path) -> None:
    path = rows_file(tmp_path, ROWS)
    assert written(sft(path), tmp_path) == [
        {"prompt": "Q: 1+1\n", "response": " 2"},
        {"prompt": "Q: a {b}\n", "response": " c\nd\u2028"},
    ]
    assert written(reward(path, **PAIRS), tmp_path)[0] == {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    assert written(reward(path, **LABELS), tmp_path)[1] == {"prompt": "a {b}", "response": "c\nd\u2028", "label": "bad"}


def test_a_prompt_may_be_the_same_for_all_and_a_response_may_not(tmp_path: Path) -> None:
    path = rows_file(tmp_path, ROWS)
    assert {row["prompt"] for row in written(sft(path, prompt="list {{1}}:"), tmp_path)} == {"list {1}:"}
    with pytest.raises(ConfigError, match=r"sft\.0\.response 'yes' names no column"):
        written(sft(path, response="yes"), tmp_path)


def test_the_digest_is_that_of_the_examples_to_train_on(tmp_path: Path) -> None:
    files = write_examples(sft(rows_file(tmp_path, ROWS)), "sft.0", tmp_path)
    assert files.sha256 == hashlib.sha256(files.train.read_bytes()).hexdigest()
    assert (files.num_train, files.heldout, files.num_heldout) == (2, None, 0)


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"q": "1"}, {}, r"sft\.0: .*rows\.jsonl, line 3: column 'a' is missing; this row has q"),
        ({"q": "1", "a": None}, {}, r"line 3: column 'a': None is neither text nor a number"),
        ({"q": "1", "a": float("nan")}, {}, r"line 3: column 'a': nan is no number; leave the row out"),
        ({"q": "1", "a": " "}, {}, r"line 3: the response, of column 'a', is empty; leave the row out"),
        ({"q": "", "a": "1"}, {"prompt": "{q}"}, r"line 3: the prompt, of column 'q', is empty; leave the row out"),
    ],
)
def test_a_row_that_is_no_example_is_named(
    tmp_path: Path, row: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        written(sft(rows_file(tmp_path, [*ROWS, row]), **fields), tmp_path)


def test_a_label_that_the_recipe_does_not_name_is_refused(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [*ROWS, {"q": "1", "a": "2", "kind": "fair"}])
    with pytest.raises(
        ConfigError, match=r"line 3: column 'kind': 'fair' is none of sft\.0\.labels \(good, bad\); add"
    ):
        written(reward(path, **LABELS), tmp_path)


def test_a_data_set_without_rows_or_splits_is_refused(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [])
    with pytest.raises(ConfigError, match=r"sft\.0: .*rows\.jsonl holds no rows"):
        written(sft(path), tmp_path)
    for field in ("split", "heldout_split"):
        with pytest.raises(ConfigError, match=r"is a file, which has no splits; remove split and heldout_split"):
            written(sft(path, **{field: "test"}), tmp_path)


def test_a_table_without_a_column_is_refused_before_a_row_is_read(tmp_path: Path) -> None:
    from tba_cli.starter_models.sample_datasets import write_parquet

    write_parquet(tmp_path / "rows.parquet", [{"q": "1", "b": "2"}])
    with pytest.raises(ConfigError, match=r"has no column 'a'; its columns are q, b: correct the names in braces"):
        written(sft(str(tmp_path / "rows.parquet")), tmp_path)


def test_a_file_that_is_absent_is_not_sought_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file .*absent\.jsonl cannot be read: No such file or directory"):
        written(sft(str(tmp_path / "absent.jsonl")), tmp_path)


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    columns = [pyarrow.array(["1"])] * 4
    table = pyarrow.Table.from_arrays(columns, names=["q", "a", "a", "b"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet has several columns 'a'; rename them"):
        written(sft(str(tmp_path / "rows.parquet")), tmp_path)
    # one that is not read does no harm
    other = table.rename_columns(["q", "a", "b", "b"])
    pytest.importorskip("pyarrow.parquet").write_table(other, tmp_path / "rows.parquet")
    assert written(sft(str(tmp_path / "rows.parquet")), tmp_path) == [{"prompt": "Q: 1\n", "response": " 1"}]
