"""Batches drawn ahead of the step that uses them.

thread   waits for   permission: the step is at most `ahead` beyond the one that the loop asked for
         then draws with long polls until the buffer gives a batch or an error ends it; an answer that is no batch is
         counted and asked for again, a few times
loop     waits for   the batch of its step (`take`), named after what the buffer waits for
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tba.errors import BusyError, TbaError, WaitTimeoutError, WireError
from tba.logs import get_logger
from tba.wire import Batch
from tba_trainer.status import Status

LONG_POLL_S = 5.0
MAX_UNREADABLE = 5
"""Answers in a row that are no batch; more means that buffer and trainer are of different releases."""
_UNREADABLE_PAUSE_S = 0.2
_TICK_S = 0.1
PAUSED = "run-paused"
log = get_logger("prefetch")


class Prefetcher:
    """Draws the batches of steps `first_step`, `first_step + 1`, ... in order.

    Args:
        draw: draws the batch of a step, waiting on the server up to some seconds; raises as BufferClient.draw_batch.
        last_step: nothing is drawn beyond it.
        ahead: batches drawn while a step runs.
        batch_wait_s: deadline of the wait for one batch; a paused run does not count against it.
        batch_deadline_s: the buffer voids a batch so long after it was drawn; measured here on this machine's clock.
        stop: set when the process should end.
    """

    def __init__(
        self,
        draw: Callable[[int, float], Batch],
        *,
        status: Status,
        first_step: int,
        last_step: int,
        ahead: int,
        batch_wait_s: float,
        batch_deadline_s: float,
        stop: threading.Event,
    ) -> None:
        self._draw, self._status, self._stop = draw, status, stop
        self._last_step, self._ahead = last_step, ahead
        self._batch_wait_s, self._batch_deadline_s = batch_wait_s, batch_deadline_s
        self._changed = threading.Condition()
        self._next_step = first_step
        self._wanted_step = first_step
        self._round = 0
        self._ready: dict[int, tuple[Batch, float]] = {}  # step -> batch, void after
        self._error: Exception | None = None
        self._wait_name = "batch"
        self.num_unreadable = 0
        """Answers that were no batch, so far."""
        self._num_unreadable_in_row = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def close(self) -> None:
        """Draw nothing more; a long poll that is under way is left to end by itself."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def take(self, step: int) -> Batch | None:
        """The batch of `step`; None when the process was told to stop.

        Raises:
            WaitTimeoutError: no batch within `batch_wait_s`.
            RunOverError, FencedError, ServiceError: as drawing raised it.
        """
        batch = self._poll(step, timeout_s=0.0)
        if batch is not None:
            return batch
        name, since = self._wait_name, time.monotonic()
        with self._status.waiting(name, self._batch_wait_s):
            while not self._stop.is_set():
                batch = self._poll(step, timeout_s=_TICK_S)
                if batch is not None:
                    return batch
                if self._wait_name == PAUSED:
                    since = time.monotonic()
                left_s = self._batch_wait_s - (time.monotonic() - since)
                if self._wait_name != name:
                    name = self._wait_name
                    self._status.wait_for(name, left_s)
                if left_s <= 0:
                    raise WaitTimeoutError(
                        f"no batch for step {step} within {self._batch_wait_s:g} s: the wait is {name!r}; check that "
                        "searchers run and that rewards arrive (`tba status`), or raise trainer.batch_wait_s"
                    )
        return None

    def discard(self, step: int) -> None:
        """Forget every batch drawn so far and draw again from `step` on: the buffer has voided the batch."""
        with self._changed:
            self._round += 1
            self._ready.clear()
            self._next_step = self._wanted_step = step
            self._changed.notify_all()

    def _poll(self, step: int, timeout_s: float) -> Batch | None:
        with self._changed:
            self._wanted_step = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._ready or self._error is not None, timeout=timeout_s)
            batch, void_after = self._ready.pop(step, (None, 0.0))
            if batch is None and self._error is not None:
                raise self._error
        if batch is not None and void_after <= time.monotonic():
            self.discard(step)
            return None
        return batch

    def _permitted(self) -> bool:
        return self._next_step <= min(self._wanted_step + self._ahead, self._last_step)

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._permitted())
                step, drawn_in = self._next_step, self._round
            if self._closed.is_set():
                return
            try:
                batch = self._draw(step, LONG_POLL_S)
            except BusyError as error:
                self._wait_name = error.wait
                self._closed.wait(min(error.retry_after_s, 1.0))
                continue
            except WireError as error:
                if self._is_readable_later(step, error):
                    continue
                self._end(
                    TbaError(
                        f"{MAX_UNREADABLE} answers in a row to the request for the batch of step {step} were no batch "
                        f"({error}); run the same tba release on every service, and start the trainer again"
                    )
                )
                return
            except Exception as error:
                self._end(error if isinstance(error, TbaError) else TbaError(f"drawing a batch failed: {error}"))
                return
            self._num_unreadable_in_row = 0
            with self._changed:
                self._wait_name = "batch"
                if drawn_in == self._round:
                    self._ready[step] = (batch, time.monotonic() + self._batch_deadline_s)
                    self._next_step = step + 1
                    self._changed.notify_all()

    def _is_readable_later(self, step: int, error: WireError) -> bool:
        """Count an answer that is no batch; whether the step's batch is asked for again."""
        self.num_unreadable += 1
        self._num_unreadable_in_row += 1
        log.warning("batch_unreadable", step=step, num_in_row=self._num_unreadable_in_row, error=str(error))
        self._closed.wait(_UNREADABLE_PAUSE_S)
        return self._num_unreadable_in_row < MAX_UNREADABLE

    def _end(self, error: Exception) -> None:
        """The loop raises this at its next call."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
