"""All trackers of a trainer as one object, with a thread for each, and a thread that looks for finished evaluations."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tba import plugins
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import TbaError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_trainer.tracking.jsonl import JsonlTracker, known_evaluations
from tba_trainer.tracking.tensorboard import TensorboardTracker
from tba_trainer.tracking.tracker import Metrics, Record, Tracker, evaluation_record
from tba_trainer.tracking.wandb import WandbTracker

EVALUATIONS_INTERVAL_S = 2.0
"""Seconds between two looks for finished evaluations."""
MAX_PENDING = 1000
"""Records that may wait for a slow tracker; more are dropped."""
CLOSE_S = 10.0
"""How long `close` waits for trackers to write what they have."""
_SHOWN_SECTIONS = {"run", "model", "data", "sampling", "searcher", "objective", "trainer", "eval"}
"""Sections of the recipe that trackers show. Addresses and names of token files are in other sections."""
_TICK_S = 0.1
"""Seconds until an idle thread notices that it should end."""
log = get_logger("tracking")


class TrackerGroup:
    """Passes every record to every tracker. No method waits or raises but `close`, which waits a bounded time."""

    def __init__(
        self, run: str, trackers: Iterable[Tracker], *, buffer: BufferClient, known: Iterable[str] = ()
    ) -> None:
        self._run, self._buffer, self._known = run, buffer, set(known)
        self._threads = [TrackerThread(tracker) for tracker in trackers]
        self._closed = threading.Event()
        self._evaluations = threading.Thread(target=self._watch, name="tracking-evaluations", daemon=True)

    def start(self, lineage: int, parent: PolicyVersion) -> None:
        """Begin a lineage at its parent."""
        self._submit(Record(kind="start", run=self._run, lineage=lineage, step=parent.step, parent=str(parent)))
        if self._evaluations.ident is None:  # after a rollback it runs already
            self._evaluations.start()

    def step(self, version: PolicyVersion, metrics: Metrics, *, skipped: str | None) -> None:
        """Record a step; `skipped` says why its batch was not applied."""
        lineage, step = version.lineage, version.step
        self._submit(Record(kind="step", run=self._run, lineage=lineage, step=step, skipped=skipped, metrics=metrics))

    def gauges(self) -> dict[str, float]:
        """Return the counts of lost records."""
        return {
            "num_tracking_dropped": float(sum(thread.num_dropped for thread in self._threads)),
            "num_tracking_failed": float(sum(thread.num_failed for thread in self._threads)),
        }

    def close(self) -> None:
        """Look for evaluations once more, then let every tracker write its records."""
        deadline = time.monotonic() + CLOSE_S
        self._closed.set()
        if self._evaluations.ident is not None:
            self._evaluations.join(CLOSE_S)
        # all are told to end before the first one is waited for
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


class TrackerThread:
    """Hands records to a tracker in order, from a thread and a queue. Submitting never waits and never raises."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._queue: queue.Queue[Record] = queue.Queue(MAX_PENDING)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{tracker.name}", daemon=True)
        self.num_dropped = 0
        """Records that found the queue full."""
        self.num_failed = 0
        """Records that the tracker could not keep."""
        self._thread.start()

    def submit(self, record: Record) -> None:
        """Hand over a record."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:  # logged once, counted always
                log.warning("tracker_is_slow", tracker=self._tracker.name, max_pending=self._queue.maxsize)

    def close(self) -> None:
        """Let the thread end once its queue is empty; `join` waits for that."""
        self._closed.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, at most `timeout_s`; then log a warning and leave it running."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("tracker_did_not_end", tracker=self._tracker.name, num_pending=self._queue.qsize())

    def _run(self) -> None:
        while not (self._closed.is_set() and self._queue.empty()):
            try:
                record = self._queue.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            try:
                (self._tracker.start if record.kind == "start" else self._tracker.log)(record)
            except Exception as error:
                self._count_failure(error)
        try:
            self._tracker.close()
        except Exception as error:
            self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        self.num_failed += 1
        if self.num_failed == 1:
            log.warning("tracker_failed", tracker=self._tracker.name, error=f"{type(error).__name__}: {error}")


def open_trackers(recipe: Recipe, buffer: BufferClient) -> TrackerGroup:
    """Open the trackers that the recipe names.

    Raises:
        ConfigError: metrics.jsonl cannot be written, a package is missing, or a tracker from outside cannot be built.
    """
    section = recipe.tracking
    path, shown = Path(section.metrics_path), recipe.model_dump(mode="json", include=_SHOWN_SECTIONS)
    trackers: list[Tracker] = []
    if section.tensorboard_dir is not None:
        trackers.append(TensorboardTracker(Path(section.tensorboard_dir)))
    if section.wandb is not None:
        trackers.append(WandbTracker(section.wandb, shown, folder=path.parent / "wandb"))
    for name in section.trackers:
        made = plugins.build(name, shown, what="tracking.trackers", kind=Tracker)
        trackers.append(made)
    return TrackerGroup(
        recipe.run.name, [JsonlTracker(path), *trackers], buffer=buffer, known=known_evaluations(path, recipe.run.name)
    )
