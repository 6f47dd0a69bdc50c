"""The data set of rollouts that is pushed to the hub: what `datasets` reads of its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from pyarrow import Table, parquet
from tba_buffer.rollouts.parquet import schema

from tba.api import EVICTED_KEY, OriginInfo, RunInfo
from tba.errors import ConfigError
from tba_cli.artifacts import rollout_dataset
from tba_cli.artifacts.rollout_dataset import COLUMNS, DatasetFacts, Exported, write_dataset
from tests.support.history_values import RUN_INFO

FACTS = DatasetFacts(run=RunInfo.model_validate(RUN_INFO), recipe=None, filters={}, licence=None)


def export(path: Path, num: int) -> Path:
    """Write a file as the service does, with two rollouts in a row group."""
    rows: list[dict[str, Any]] = [
        {
            "rollout_id": f"{number:032x}",
            "reward": number / 4,
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None, "stop": []},
            "version_spans": [{"version": "1-2", "start": 0, "end": 2}],
            "response_tokens": [number, 7],
        }
        for number in range(num)
    ]
    with parquet.ParquetWriter(path, schema(tokens=True)) as writer:
        writer.write_table(Table.from_pylist(rows, schema=schema(tokens=True)), row_group_size=2)
        writer.add_key_value_metadata({EVICTED_KEY: "3"})
    return path


@pytest.mark.parametrize("shard_bytes", [1, 10**9], ids=["many", "one"])
def test_the_library_reads_every_shard_by_the_head_of_the_card(
    shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_dataset, "SHARD_BYTES", shard_bytes)
    folder = tmp_path / "set"
    folder.mkdir()
    assert write_dataset(export(folder / "all.parquet", 5), folder, FACTS) == Exported(5, 3)
    num = 3 if shard_bytes == 1 else 1
    names = [f"train-{number:05}-of-{num:05}.parquet" for number in range(num)]
    assert sorted(path.name for path in (folder / "data").iterdir()) == names
    assert {path.name for path in folder.iterdir()} == {"README.md", "data"}
    found: Any = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert list(found) == ["train"]
    assert (found["train"]["reward"][:], found["train"][4]["response_tokens"]) == ([0.0, 0.25, 0.5, 0.75, 1.0], [4, 7])
    card = (folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert (head["license"], head["configs"][0]["data_files"][0]["split"]) == ("unknown", "train")
    assert "These are all stored rollouts, oldest first, but for 3 that were evicted meanwhile." in card
    assert "| `sampler_logprobs` | log-prob of each response token" in card


def test_the_card_of_a_snapshot_names_it_and_what_it_does_not_have(tmp_path: Path) -> None:
    origin = OriginInfo(source="demo/end", version=None, state="complete")
    run = FACTS.run.model_copy(update={"is_snapshot": True, "origin": origin})
    (tmp_path / "set").mkdir()
    write_dataset(export(tmp_path / "all.parquet", 2), tmp_path / "set", replace(FACTS, run=run))
    card = (tmp_path / "set" / "README.md").read_text()
    assert "These are all stored rollouts of its snapshot `demo/end`, oldest first" in card
    assert "| `num_batches` | training batches that drew it; null: this is not part of a snapshot |" in card


def test_every_column_of_the_service_is_described() -> None:
    assert list(COLUMNS) == schema(tokens=True).names


def test_an_empty_data_set_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no stored rollout matches"):
        write_dataset(export(tmp_path / "all.parquet", 0), tmp_path, FACTS)
