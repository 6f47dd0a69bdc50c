"""MLflow: one run per lineage, with the tag `tba.run` of the run of tba that they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tba.config.trainer import MlflowSection
from tba_trainer.tracking.details import COLUMNS, Details
from tba_trainer.tracking.tracker import Record, require

MAX_PARAMS = 100
"""Parameters of one request; MLflow refuses more."""
MAX_PARAM_CHARS = 500
"""Longer parameters are cut: older servers refuse them."""


class MlflowTracker:
    """Logs to a tracking server, or a database of this machine, by one request per record.

    Histograms and samples, of which MLflow has no curves, are artifacts: `histograms/STEP.json`, `samples/STEP.json`.
    The last samples are also a table of MLflow (`mlflow.load_table`).

    Args:
        recipe: its keys are the parameters of every run.

    Raises:
        ConfigError: the package is missing.
    """

    name = "mlflow"

    def __init__(self, section: MlflowSection, recipe: Mapping[str, Any]) -> None:
        require("mlflow", setting="[tracking.mlflow]")
        self._section, self._recipe = section, recipe
        self._start: Record | None = None
        self._client: Any = None
        self._run_id: str | None = None

    def start(self, record: Record) -> None:
        """Finish the last lineage's run; the first record of this one begins another."""
        self.close()
        self._start = record

    def log(self, record: Record) -> None:
        """Add the numbers of a record."""
        run_id = self._opened()
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]  # see the group trackers

        at_ms = int(record.at_s * 1000)
        metrics = [Metric(name, value, at_ms, record.step) for name, value in record.numbers.items()]
        self._client.log_batch(run_id, metrics=metrics)

    def log_details(self, details: Details) -> None:
        """Add the artifacts of a step."""
        run_id, file = self._opened(), f"{details.version.step:08d}.json"
        if details.histograms:
            document = {n: {"counts": h.counts, "edges": h.edges} for n, h in details.histograms.items()}
            self._client.log_dict(run_id, document, f"histograms/{file}")
        if details.samples:
            self._client.log_dict(run_id, {"columns": COLUMNS, "data": details.rows()}, f"samples/{file}")
            # what `log_table` does, without pandas; of the last table alone, because a tag is short
            table = [{"path": f"samples/{file}", "type": "table"}]
            self._client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps(table))

    def close(self) -> None:
        """Finish the run."""
        run_id, self._run_id = self._run_id, None
        if run_id is not None:
            self._client.set_terminated(run_id)

    def _opened(self) -> str:
        """Return the id of the run; make it where there is none yet."""
        if self._run_id is not None:
            return self._run_id
        for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"):
            os.environ.setdefault(name, "true")  # read by the import
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # see the group trackers
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        assert self._start is not None
        if self._client is None:
            self._client = MlflowClient(tracking_uri=self._section.tracking_uri)
        experiment = self._client.get_experiment_by_name(self._section.experiment)
        experiment_id = (
            self._client.create_experiment(self._section.experiment) if experiment is None else experiment.experiment_id
        )
        lineage = str(self._start.lineage)
        tags = {"tba.run": self._start.run, "tba.lineage": lineage, "tba.parent": str(self._start.parent)}
        run = self._client.create_run(experiment_id, run_name=f"{self._start.run}-{lineage}", tags=tags)
        self._run_id = run.info.run_id
        params = [Param(name, value) for name, value in _flattened(self._recipe)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
        return run.info.run_id


def _flattened(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a document with dots, and their values as text."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)[:MAX_PARAM_CHARS]
