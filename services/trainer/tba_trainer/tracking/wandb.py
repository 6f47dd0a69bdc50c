"""Weights & Biases, or trackio: one run per lineage, all runs of a training in one group named after it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.config.trainer import WandbSection
from tba_trainer.tracking.tracker import Record, require


class WandbTracker:
    """Logs to Weights & Biases, which has threads and a process of its own, or to trackio, which has the same calls.

    Args:
        recipe: the config that every run shows.
        folder: for the files of W&B.

    Raises:
        ConfigError: the package is missing.
    """

    name = "wandb"

    def __init__(self, section: WandbSection, recipe: Mapping[str, Any], *, folder: Path) -> None:
        self._package = "trackio" if section.mode == "trackio" else "wandb"
        require(self._package, setting="[tracking.wandb]")
        self._section, self._recipe, self._folder = section, recipe, folder
        self._start: Record | None = None
        self._run: Any = None

    def start(self, record: Record) -> None:
        """Finish the last lineage's run; the first record of this one begins another."""
        self.close()
        self._start = record

    def log(self, record: Record) -> None:
        """Add the numbers of a record."""
        if self._package == "trackio":
            self._opened().log(record.numbers, step=record.step)
        else:
            # steps are a metric of their own: W&B's step must grow, and an evaluation is of an earlier step
            self._opened().log({"step": record.step, **record.numbers})

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _opened(self) -> Any:
        """Return the run; begin it where there is none yet."""
        if self._run is None:
            self._run = self._init()
        return self._run

    def _init(self) -> Any:
        wandb = importlib.import_module(self._package)
        assert self._start is not None
        shown = {
            "project": self._section.project,
            "group": self._start.run,
            "name": f"{self._start.run}-{self._start.lineage}",
            "config": {**self._recipe, "lineage": self._start.lineage, "parent": self._start.parent},
        }
        if self._package == "trackio":
            return wandb.init(**shown, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", silent=True)
        run = wandb.init(**shown, mode=self._section.mode, dir=str(self._folder), settings=settings)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run
