"""trackio: one run per lineage, all runs of a training in one group named after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba.config.trainer import TrackioSection
from tba_trainer.tracking.details import COLUMNS, Cell, Details
from tba_trainer.tracking.tracker import Record, require


class TrackioTracker:
    """Logs to trackio: to this machine, or to a Hugging Face Space.

    Args:
        recipe: the config that every run shows.

    Raises:
        ConfigError: the package is missing.
    """

    name = "trackio"

    def __init__(self, section: TrackioSection, recipe: Mapping[str, Any]) -> None:
        require("trackio", setting="[tracking.trackio]")
        self._section, self._recipe = section, recipe
        self._start: Record | None = None
        self._run: Any = None

    def start(self, record: Record) -> None:
        """Finish the last lineage's run; the first record of this one begins another."""
        self.close()
        self._start = record

    def log(self, record: Record) -> None:
        """Add the numbers of a record."""
        self._opened().log(record.numbers, step=record.step)

    def log_details(self, details: Details) -> None:
        """Add the histograms of a step, and a trace for each sample rollout."""
        import trackio  # pyright: ignore[reportMissingImports]  # see the group trackers

        found: dict[str, Any] = {
            f"histogram/{name}": trackio.Histogram(np_histogram=(histogram.counts, histogram.edges))
            for name, histogram in details.histograms.items()
        }
        if details.samples:
            found["samples"] = [trackio.Trace(*_trace(row)) for row in details.rows()]
        self._opened().log(found, step=details.version.step)

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
        import trackio  # pyright: ignore[reportMissingImports]  # see the group trackers

        assert self._start is not None
        return trackio.init(
            project=self._section.project,
            name=f"{self._start.run}-{self._start.lineage}",
            group=self._start.run,
            space_id=self._section.space_id,
            config={**self._recipe, "lineage": self._start.lineage, "parent": self._start.parent},
            resume="never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


def _trace(row: list[Cell]) -> tuple[list[dict[str, Cell]], dict[str, Cell]]:
    """Return the messages and the metadata of a trace: the texts of a row, and the rest of it."""
    cells: dict[str, Cell] = dict(zip(COLUMNS, row, strict=True))
    texts = {"user": cells.pop("prompt"), "assistant": cells.pop("completion")}
    return [{"role": role, "content": text} for role, text in texts.items() if text is not None], cells
