"""One tracker with its thread and its queue: submitting never waits and never raises."""

from __future__ import annotations

import queue
import threading
from typing import Protocol

from tba.logs import get_logger
from tba_trainer.tracking.records import Record

log = get_logger("tracking")


class Tracker(Protocol):
    """Something that keeps records. Both methods are called in one thread, and may raise anything."""

    name: str

    def log(self, record: Record) -> None:
        """Keep a record."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TrackerThread:
    """Hands records to a tracker, in order.

    Args:
        max_pending: records that may wait; more are dropped.
    """

    def __init__(self, tracker: Tracker, *, max_pending: int) -> None:
        self._tracker = tracker
        self._queue: queue.Queue[Record] = queue.Queue(max_pending)
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
            if self.num_dropped == 1:
                log.warning("tracker_is_slow", tracker=self._tracker.name, max_pending=self._queue.maxsize)

    def close(self) -> None:
        """Let the thread end once its queue is empty; `join` waits for that."""
        self._closed.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end; a tracker that takes longer is left behind."""
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
                self._tracker.log(record)
            except Exception as error:
                self._failed(error)
        try:
            self._tracker.close()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.num_failed += 1
        if self.num_failed == 1:
            log.warning("tracker_failed", tracker=self._tracker.name, error=f"{type(error).__name__}: {error}")


_TICK_S = 0.1
"""How long a thread with nothing to do takes to notice that it is to end."""
