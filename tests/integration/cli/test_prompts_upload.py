"""`tba prompts upload` against a real buffer: a foreign data set becomes prompts that searchers lease."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tba.api import LeaseRequest
from tba_cli.main import main
from tests.support.buffer import start_lineage
from tests.support.buffer_fixtures import ServeBuffer

MAPPING = ["--task", "math", "--text-template", "Q: {question}\nA:", "--data", "gold=answer", "--heldout-every", "10"]


def rows(num: int) -> list[dict[str, str]]:
    return [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(num)]


def test_a_foreign_data_set_is_uploaded_once_whatever_its_format(
    serve_buffer: ServeBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = serve_buffer()
    client = buffer.client()
    jsonl, parquet = tmp_path / "q.jsonl", tmp_path / "q.parquet"
    jsonl.write_text("\n".join(map(json.dumps, rows(2500))))
    pq.write_table(pa.Table.from_pylist(list(reversed(rows(2500)))), parquet)
    assert main(["prompts", "upload", str(jsonl), "--url", buffer.url, *MAPPING]) == 0
    out = capsys.readouterr().out  # and what the buffer in this process logs
    stats = client.stats()
    assert stats.num_prompts_train + stats.num_prompts_heldout == 2500
    assert 150 < stats.num_prompts_heldout < 350
    assert out.endswith(
        f"2500 new and 0 known prompts; the run now has {stats.num_prompts_train} to train on and "
        f"{stats.num_prompts_heldout} held out\n"
    )
    assert main(["prompts", "upload", str(parquet), "--url", buffer.url, *MAPPING]) == 0
    assert capsys.readouterr().out.startswith("0 new and 2500 known prompts; ")
    start_lineage(client)
    (lease,) = client.lease(LeaseRequest(searcher_id="s", max_leases=1)).leases
    number = int(lease.prompt.data["gold"]) // 2
    assert lease.prompt.text == f"Q: What is {number} + {number}?\nA:"


def test_a_bad_row_uploads_nothing(
    serve_buffer: ServeBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer, path = serve_buffer(), tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows(1500), {"question": "What is it?"}])))
    assert main(["prompts", "upload", str(path), "--url", buffer.url, *MAPPING]) == 2
    assert "line 1501: column 'answer' is missing; this row has question" in capsys.readouterr().err
    assert buffer.client().stats().num_prompts_train == 0


def test_changed_prompts_under_old_ids_are_refused(
    serve_buffer: ServeBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer, path = serve_buffer(), tmp_path / "q.jsonl"
    flags = ["--url", buffer.url, "--task", "math", "--text", "question", "--id", "uid"]
    path.write_text(json.dumps({"uid": 7, "question": "What is 7?"}))
    assert main(["prompts", "upload", str(path), *flags]) == 0
    path.write_text(json.dumps({"uid": 7, "question": "What is 8?"}))
    assert main(["prompts", "upload", str(path), *flags]) == 2
    assert "prompt id '7' is stored with other content; give changed prompts a new id" in capsys.readouterr().err
