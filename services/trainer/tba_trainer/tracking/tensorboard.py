"""TensorBoard: one curve per metric over optimizer steps, whatever lineages they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tba_trainer.tracking.packages import require
from tba_trainer.tracking.records import Record


class TensorboardTracker:
    """Writes event files; every start of the trainer begins a new one.

    Raises:
        ConfigError: the package is missing.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        require("tensorboard", setting="tracking.tensorboard_dir")
        self._folder = folder
        self._writer: Any = None

    def log(self, record: Record) -> None:
        """Add the numbers of a record; steps after the parent of a new lineage are purged: they are made again."""
        if record.kind == "start":
            from torch.utils.tensorboard.writer import SummaryWriter

            self.close()
            self._writer = SummaryWriter(str(self._folder), purge_step=record.step + 1)
        for name, value in record.numbers.items():
            self._writer.add_scalar(name, value, global_step=record.step, walltime=record.at_s)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
