"""TensorBoard: one curve per metric over optimizer steps, across lineages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba_trainer.tracking.details import COLUMNS, Cell, Details, Histogram
from tba_trainer.tracking.tracker import Record, require


class TensorboardTracker:
    """Writes event files, a new one for every lineage.

    Raises:
        ConfigError: the package is missing.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        require("tensorboard", setting="tracking.tensorboard_dir")
        self._folder = folder
        self._writer: Any = None

    def start(self, record: Record) -> None:
        """Begin a file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self.close()
        # the steps after the parent of the lineage are made again: their old points are hidden
        self._writer = SummaryWriter(str(self._folder), purge_step=record.step + 1)

    def log(self, record: Record) -> None:
        """Add the numbers of a record."""
        for name, value in record.numbers.items():
            self._writer.add_scalar(name, value, global_step=record.step, walltime=record.at_s)

    def log_details(self, details: Details) -> None:
        """Add the histograms and the table of a step."""
        at = {"global_step": details.version.step, "walltime": details.at_s}
        for name, histogram in details.histograms.items():
            self._writer.add_histogram_raw(f"histogram/{name}", **_raw(histogram), **at)
        if details.samples:
            self._writer.add_text("samples", markdown_table(COLUMNS, details.rows()), **at)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()


def _raw(histogram: Histogram) -> dict[str, Any]:
    """Return a histogram as TensorBoard stores it; sums are those of the middles of the bins."""
    middles = [(low + high) / 2 for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
    return {
        "min": histogram.edges[0],
        "max": histogram.edges[-1],
        "num": sum(histogram.counts),
        "sum": sum(count * middle for count, middle in zip(histogram.counts, middles, strict=True)),
        "sum_squares": sum(count * middle**2 for count, middle in zip(histogram.counts, middles, strict=True)),
        "bucket_limits": histogram.edges[1:],
        "bucket_counts": histogram.counts,
    }


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table in Markdown; texts of a model stay text, whatever is in them."""
    lines = [columns, ["---"] * len(columns), *([_literal(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _literal(cell: Cell) -> str:
    if cell is None:
        return ""
    # as entities no character is markup, of Markdown or of HTML
    text = re.sub(r"[^\w\s]|_", lambda found: f"&#{ord(found[0])};", str(cell))
    return "<br>".join(text.splitlines())
