"""Reads the files that Weights & Biases writes without a network."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32 * 1024
_RECORD_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def history_of(path: Path) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the group, the name and the logged rows of a run-*.wandb file."""
    from wandb.proto import wandb_internal_pb2 as records

    group, name, history = "", "", []
    for data in _records(path.read_bytes()):
        record = records.Record()  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        record.ParseFromString(data)
        if record.HasField("run"):
            group, name = record.run.run_group, record.run.display_name
        if record.HasField("history"):
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            history.append({key: value for key, value in items.items() if not key.startswith("_")})
    return group, name, history


def _records(data: bytes) -> Iterator[bytes]:
    whole, at = b"", 7  # the file's own header
    while at + _RECORD_HEADER.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _RECORD_HEADER.size:
            at += left
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(data, at)
        at += _RECORD_HEADER.size
        assert kind in (_FULL, _FIRST, _MIDDLE, _LAST)
        whole += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""
