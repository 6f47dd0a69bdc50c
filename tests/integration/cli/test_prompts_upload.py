"""`tba prompts upload` against a real buffer: rows become prompts that searchers lease."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tba.api import LeaseRequest
from tba_cli.main import main
from tests.support.buffer import start_lineage
from tests.support.buffer_fixtures import ServeBuffer


def rows(num: int) -> list[dict[str, Any]]:
    splits = ["heldout" if i % 10 == 0 else "train" for i in range(num)]
    return [
        {"prompt_id": f"sum-{i}", "task": "math", "text": f"{i} + {i}?", "data": {"gold": str(2 * i)}, "split": split}
        for i, split in enumerate(splits)
    ]


def test_a_file_is_uploaded_once_and_whole_or_not_at_all(
    serve_buffer: ServeBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer, path = serve_buffer(), tmp_path / "q.jsonl"
    client, words = buffer.client(), ["prompts", "upload", str(path), "--url", buffer.url]

    def write(*lines: dict[str, Any]) -> None:
        path.write_text("\n".join(map(json.dumps, lines)))

    write(*rows(1500), {"prompt_id": "p", "task": "math"})
    assert main(words) == 2
    assert "line 1501: text: Field required" in capsys.readouterr().err
    assert client.stats().num_prompts_train == 0
    write(*rows(2500))
    assert main(words) == 0
    out = capsys.readouterr().out  # and what the buffer in this process logs
    assert out.endswith("2500 new and 0 known prompts; the run now has 2250 to train on and 250 held out\n")
    write(*reversed(rows(2500)))
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("0 new and 2500 known prompts; ")
    write({**rows(8)[7], "text": "What is 7?"})
    assert main(words) == 2
    assert "prompt id 'sum-7' is stored with other content; give changed prompts a new id" in capsys.readouterr().err
    start_lineage(client)
    (lease,) = client.lease(LeaseRequest(searcher_id="s", max_leases=1)).leases
    number = int(lease.prompt.data["gold"]) // 2
    assert lease.prompt.text == f"{number} + {number}?"
