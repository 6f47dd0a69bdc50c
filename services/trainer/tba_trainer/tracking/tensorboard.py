"""TensorBoard: one curve per metric over optimizer steps, across lineages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tba_trainer.tracking.tracker import Record, require


class TensorboardTracker:
    """Writes event files, a new one for every lineage."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        require("tensorboard", setting="tracking.tensorboard_dir")
        self._folder = folder
        self._writer: Any = None

    def start(self, record: Record) -> None:
        """Begin a new event file. It hides older points after `record.step`, because those steps are trained again."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self.close()
        # the steps after the parent of the lineage are made again: their old points are hidden
        self._writer = SummaryWriter(str(self._folder), purge_step=record.step + 1)

    def log(self, record: Record) -> None:
        """Add the numbers of a record."""
        for name, value in record.numbers.items():
            self._writer.add_scalar(name, value, global_step=record.step, walltime=record.at_s)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
