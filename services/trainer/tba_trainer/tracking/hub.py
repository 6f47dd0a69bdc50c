"""All trackers of a trainer behind one door, and the thread that looks for finished evaluations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import TbaError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_trainer.tracking.jsonl import JsonlTracker, known_evaluations
from tba_trainer.tracking.records import Metrics, Record, evaluation_record, start_record, step_record
from tba_trainer.tracking.tensorboard import TensorboardTracker
from tba_trainer.tracking.trackio import TrackioTracker
from tba_trainer.tracking.wandb import WandbTracker
from tba_trainer.tracking.worker import Tracker, TrackerThread

EVALUATIONS_INTERVAL_S = 2.0
"""How often the buffer is asked what evaluations are done; one more time at the end."""
_SHOWN = {"run", "model", "data", "sampling", "searcher", "objective", "trainer", "eval"}
"""Sections of the recipe that trackers show; addresses and files with tokens stay here."""
log = get_logger("tracking")


class Tracking:
    """Tells every tracker everything. No method waits or raises, but `close`, which waits a bounded time.

    Args:
        run: name of the run.
        known: evaluations that were told before.
        close_s: how long `close` waits.
    """

    def __init__(
        self,
        run: str,
        trackers: Iterable[Tracker],
        *,
        buffer: BufferClient,
        known: Iterable[str] = (),
        max_pending: int,
        close_s: float,
    ) -> None:
        self._run, self._buffer, self._known, self._close_s = run, buffer, set(known), close_s
        self._threads = [TrackerThread(tracker, max_pending=max_pending) for tracker in trackers]
        self._closed = threading.Event()
        self._evaluations = threading.Thread(target=self._watch, name="tracking-evaluations", daemon=True)

    def start(self, lineage: int, parent: PolicyVersion) -> None:
        """A lineage begins, at its parent."""
        self._submit(start_record(self._run, lineage, parent))
        if self._evaluations.ident is None:
            self._evaluations.start()

    def step(self, version: PolicyVersion, metrics: Metrics, *, skipped: str | None) -> None:
        """A step was made, or skipped for a reason."""
        self._submit(step_record(self._run, version, metrics, skipped=skipped))

    def gauges(self) -> dict[str, float]:
        """Records that were lost."""
        return {
            "num_tracking_dropped": float(sum(thread.num_dropped for thread in self._threads)),
            "num_tracking_failed": float(sum(thread.num_failed for thread in self._threads)),
        }

    def close(self) -> None:
        """Look for evaluations once more, then let every tracker write what it has."""
        deadline = time.monotonic() + self._close_s
        self._closed.set()
        if self._evaluations.ident is not None:
            self._evaluations.join(self._close_s)
        for thread in self._threads:
            thread.close()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _submit(self, record: Record) -> None:
        for thread in self._threads:
            thread.submit(record)

    def _watch(self) -> None:
        while True:
            is_last = self._closed.wait(EVALUATIONS_INTERVAL_S)
            try:
                evaluations = self._buffer.run().evals
            except TbaError as error:
                log.info("evaluations_not_read", error=str(error))
                evaluations = []
            for evaluation in evaluations:
                if evaluation.state == "done" and evaluation.eval_id not in self._known:
                    self._known.add(evaluation.eval_id)
                    self._submit(evaluation_record(self._run, evaluation))
            if is_last:
                return


def open_tracking(recipe: Recipe, buffer: BufferClient) -> Tracking:
    """The trackers that the recipe names.

    Raises:
        ConfigError: metrics.jsonl cannot be written, or a package is missing.
    """
    section = recipe.tracking
    path, shown = Path(section.metrics_path), recipe.model_dump(mode="json", include=_SHOWN)
    trackers: list[Tracker] = []
    if section.tensorboard_dir is not None:
        trackers.append(TensorboardTracker(Path(section.tensorboard_dir)))
    if section.wandb is not None:
        trackers.append(WandbTracker(section.wandb, shown))
    if section.trackio is not None:
        trackers.append(TrackioTracker(section.trackio, shown))
    return Tracking(
        recipe.run.name,
        [JsonlTracker(path), *trackers],
        buffer=buffer,
        known=known_evaluations(path, recipe.run.name),
        max_pending=section.max_pending,
        close_s=section.close_s,
    )
