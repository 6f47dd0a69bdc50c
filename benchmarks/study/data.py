"""The data file: one finished cell per line, appended and synced; a torn last line is cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.study.cells import Cell, Line


def read_lines(path: Path) -> dict[str, Line]:
    """All finished cells by key; a last line without a newline (a crash while writing) does not count."""
    if not path.is_file():
        return {}
    lines = {}
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n"):
            document = json.loads(text)
            line = Line(cell=Cell(**document["cell"]), result=document["result"])
            lines[line.cell.key] = line
    return lines


def append_line(path: Path, cell: Cell, result: Mapping[str, Any], source: Mapping[str, str]) -> None:
    """Add a finished cell; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"key": cell.key, "cell": cell.document(), "result": result, "source": source}
    with path.open("ab+") as file:
        _cut_torn_line(file)
        file.write(json.dumps(document, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _cut_torn_line(file: Any) -> None:
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.seek(0, os.SEEK_END)
