"""The tensors of experts in an export: one for each expert and projection, as most tools know them.

transformers 5 holds the experts of a layer in two tensors, [E, 2 I, H] (gate above up) and [E, H, I] (down), and
versions have those. Row after row, they are the tensors of the experts one after another: the bytes stay, and the
header of the file changes. E experts, I their inner size, H hidden units.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tba.weights.digest import tensor_header

SPLIT_FAMILIES = frozenset({"olmoe", "qwen2_moe", "qwen3_moe"})
"""`model_type` of the families whose experts are called `mlp.experts.0.gate_proj.weight` and so on."""
_PARTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}
_ALIGNMENT_BYTES = 8


def split_experts(path: Path) -> None:
    """Give the experts of a safetensors file tensors of their own, in place.

    Raises:
        MalformedError: not a safetensors file.
        OSError: the disk is full, for example: the file is written anew beside itself.
    """
    old = tensor_header(path)
    new = {name: entry for names in map(_split, old, old.values()) for name, entry in names}
    if new.keys() == old.keys():
        return
    header = json.dumps({"__metadata__": {"format": "pt"}, **new}).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)  # tensors begin at a multiple of it
    other = path.with_suffix(".part")
    try:
        with path.open("rb") as source, other.open("wb") as target:
            source.seek(8 + int.from_bytes(source.read(8), "little"))
            target.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(source, target, 2**24)
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)


def _split(name: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and header entries that a tensor becomes."""
    suffix = next((suffix for suffix in _PARTS if name.endswith(suffix)), None)
    if suffix is None:
        yield name, entry
        return
    layer, parts = name.removesuffix(suffix), _PARTS[suffix]
    num_experts, num_rows, num_columns = entry["shape"]
    start, end = entry["data_offsets"]
    size_bytes = (end - start) // (num_experts * len(parts))
    for number in range(num_experts * len(parts)):
        expert, part = divmod(number, len(parts))
        first = start + number * size_bytes
        yield (
            f"{layer}.mlp.experts.{expert}.{parts[part]}.weight",
            {
                "dtype": entry["dtype"],
                "shape": [num_rows // len(parts), num_columns],
                "data_offsets": [first, first + size_bytes],
            },
        )
