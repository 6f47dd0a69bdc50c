"""Weights & Biases: one run per lineage, all runs of a training in one group named after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.config.trainer import WandbSection
from tba_trainer.tracking.tracker import Record, require


class WandbTracker:
    """Logs to Weights & Biases, which has threads and a process of its own.

    Args:
        recipe: the config that every run shows.

    Raises:
        ConfigError: the package is missing.
    """

    name = "wandb"

    def __init__(self, section: WandbSection, recipe: Mapping[str, Any]) -> None:
        require("wandb", setting="[tracking.wandb]")
        self._section, self._recipe = section, recipe
        self._start: Record | None = None
        self._run: Any = None

    def start(self, record: Record) -> None:
        """Finish the last lineage's run; the first record of this one begins another."""
        self.close()
        self._start = record

    def log(self, record: Record) -> None:
        """Add the numbers of a record."""
        if self._run is None:
            self._run = self._init()
        # steps are a metric of their own: W&B's step must grow, and an evaluation is of an earlier step
        self._run.log({"step": record.step, **record.numbers})

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _init(self) -> Any:
        import wandb

        assert self._start is not None
        Path(self._section.folder).mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self._section.project,
            entity=self._section.entity,
            mode=self._section.mode,
            dir=self._section.folder,
            group=self._start.run,
            name=f"{self._start.run}-{self._start.lineage}",
            config={**self._recipe, "lineage": self._start.lineage, "parent": self._start.parent},
            settings=wandb.Settings(console="off", silent=True),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run
