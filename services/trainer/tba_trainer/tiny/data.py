"""Small data sets as the hub stores them: Parquet files by split, and a README that names configurations and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tba_trainer.tiny.rows import NUM_HELDOUT, NUM_TRAIN, Row, gsm8k_row, math_500_row, math_row, rows, tldr_row


@dataclass(frozen=True, slots=True)
class Shape:
    """One data set: how a row is made, its configuration, and how many rows each split has."""

    make: Callable
    config: str
    splits: Mapping[str, int]


SHAPES = {
    "gsm8k_data": Shape(gsm8k_row, "main", {"train": NUM_TRAIN, "test": NUM_HELDOUT}),
    "tldr_data": Shape(tldr_row, "default", {"train": NUM_TRAIN, "validation": NUM_HELDOUT}),
    "math_data": Shape(math_row, "default", {"train": NUM_TRAIN, "test": NUM_HELDOUT}),
    "math_500_data": Shape(math_500_row, "default", {"train": NUM_HELDOUT}),
}


def write_dataset(folder: Path, shape: Shape, *, seed: int) -> None:
    """Write the files of a data set into `folder`, which is made."""
    place = folder / ("data" if shape.config == "default" else shape.config)
    place.mkdir(parents=True)
    for split, count in shape.splits.items():
        write_parquet(place / f"{split}-00000-of-00001.parquet", rows(shape.make, count, seed=seed, split=split))
    files = "".join(f"  - split: {split}\n    path: {place.name}/{split}-*\n" for split in shape.splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {shape.config}\n  data_files:\n{files}---\n")


def write_parquet(path: Path, table: list[Row]) -> None:
    """One Parquet file."""
    import pyarrow  # only makers of data need it
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(table), path)
