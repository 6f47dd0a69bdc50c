"""Weights & Biases: one run per lineage, all runs of a training in one group named after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.config.trainer import WandbSection
from tba_trainer.tracking.tracker import Record, require


class WandbTracker:
    """Logs to Weights & Biases, which has threads and a process of its own."""

    name = "wandb"

    def __init__(self, section: WandbSection, recipe: Mapping[str, Any], *, folder: Path) -> None:
        require("wandb", setting="[tracking.wandb]")
        self._section, self._recipe, self._folder = section, recipe, folder
        self._start: Record | None = None
        self._run: Any = None

    def start(self, record: Record) -> None:
        """Finish the W&B run of the last lineage. The next `log` begins a W&B run for the new lineage."""
        self.close()
        self._start = record

    def log(self, record: Record) -> None:
        """Add the numbers of a record."""
        if self._run is None:
            import wandb

            assert self._start is not None
            self._folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=self._section.project,
                group=self._start.run,
                name=f"{self._start.run}-{self._start.lineage}",
                config={**self._recipe, "lineage": self._start.lineage, "parent": self._start.parent},
                dir=str(self._folder),
                settings=wandb.Settings(console="off", silent=True),
            )
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        # steps are a metric of their own: W&B's step must grow, and an evaluation is of an earlier step
        self._run.log({"step": record.step, **record.numbers})

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
