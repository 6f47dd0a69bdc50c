"""metrics.jsonl: one line per record; every start of the trainer appends to the same file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tba.errors import ConfigError
from tba_trainer.tracking.tracker import Record


class JsonlTracker:
    """Appends records to a file."""

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size_bytes = os.fstat(self._file).st_size
            # a kill may have cut a write off
            self._is_cut = size_bytes > 0 and os.pread(self._file, 1, size_bytes - 1) != b"\n"
        except OSError as error:
            raise ConfigError(
                f"tracking.metrics_path {path} cannot be written ({error.strerror}); name a file in a writable folder"
            ) from None

    def start(self, record: Record) -> None:
        """Append the record of the start; see `log`."""
        self.log(record)

    def log(self, record: Record) -> None:
        """Append one line in one write."""
        # a newline first where the last write was cut off: that costs one line, not two
        line = f"\n{record.line()}\n" if self._is_cut else f"{record.line()}\n"
        data = line.encode()
        num_written = os.write(self._file, data)
        self._is_cut = num_written < len(data)
        if self._is_cut:
            raise OSError(f"{num_written} of {len(data)} bytes were written: the disk is full")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def known_evaluations(path: Path, run: str) -> set[str]:
    """Return the ids of the evaluations of a run that the file already has; skip lines that are cut short."""
    found: set[str] = set()
    if not path.is_file():
        return found  # there is no file yet, or it is a device or pipe, which cannot be read back
    with path.open("rb") as file:
        for line in file:
            if b'"evaluation"' not in line:  # nearly all lines are steps
                continue
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict) and document.get("kind") == "evaluation" and document.get("run") == run:
                found.add(document["eval_id"])
    return found
