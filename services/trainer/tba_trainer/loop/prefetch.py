"""Draw batches from the buffer ahead of the steps that use them.

loop     take(step)    waits for the batch of its step; the wait has the name of what the buffer waits for
thread   draws         at most `ahead` steps beyond the one that the loop asked for, with long polls, until the
                       buffer gives a batch or an error ends it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tba.errors import BusyError, TbaError, WaitTimeoutError, WireError
from tba.logs import get_logger
from tba.wire import Batch
from tba_trainer.loop.heartbeat import Status

LONG_POLL_S = 5.0
MAX_DAMAGED = 5
"""Damaged answers in a row that end the trainer: buffer and trainer are then of different releases."""
_DAMAGED_PAUSE_S = 0.2
_TICK_S = 0.1
PAUSED = "run-paused"
log = get_logger("prefetch")


class Prefetcher:
    """Draws the batches of steps `first_step`, `first_step + 1`, ... in order.

    Args:
        draw: draws the batch of a step, waiting on the server up to some seconds; raises as BufferClient.draw_batch.
        last_step: nothing is drawn beyond it.
        ahead: batches drawn while a step runs.
        batch_wait_s: deadline of the wait for one batch, without the time in which the run is paused.
        batch_deadline_s: seconds from the draw until the buffer voids a batch.
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
        self._requested_step = first_step
        self._round = 0
        """Counts `discard`; a batch that was drawn in an older round is dropped."""
        self._ready: dict[int, tuple[Batch, float]] = {}  # step -> batch, monotonic time after which it is void
        self._error: Exception | None = None
        self._wait_name = "batch"
        self.num_damaged = 0
        """Answers so far that could not be decoded as a batch."""
        self._num_damaged_in_row = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def start(self) -> None:
        """Start to draw."""
        self._thread.start()

    def close(self) -> None:
        """Draw nothing more; a long poll in progress is left to end by itself."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def take(self, step: int) -> Batch | None:
        """Return the batch of `step`; None when the process was told to stop.

        Raises:
            WaitTimeoutError: no batch within `batch_wait_s`.
            RunOverError, FencedError, ServiceError: as drawing raised it.
        """
        batch = self._poll(step, timeout_s=0.0)
        if batch is not None:
            return batch
        name, since = self._wait_name, time.monotonic()
        with self._status.named_wait(name, self._batch_wait_s):
            while not self._stop.is_set():
                batch = self._poll(step, timeout_s=_TICK_S)
                if batch is not None:
                    return batch
                if self._wait_name == PAUSED:  # the time in which the run is paused does not count
                    since = time.monotonic()
                left_s = self._batch_wait_s - (time.monotonic() - since)
                if self._wait_name != name:
                    name = self._wait_name
                    self._status.begin_wait(name, left_s)
                if left_s <= 0:
                    raise WaitTimeoutError(
                        f"no batch for step {step} within {self._batch_wait_s:g} s: the wait is {name!r}; check that "
                        "searchers run and that rewards arrive (`tba status`), or raise trainer.batch_wait_s"
                    )
        return None

    def discard(self, step: int) -> None:
        """Forget every batch drawn so far and draw again from `step` on."""
        with self._changed:
            self._round += 1
            self._ready.clear()
            self._next_step = self._requested_step = step
            self._changed.notify_all()

    def _poll(self, step: int, timeout_s: float) -> Batch | None:
        with self._changed:
            self._requested_step = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._ready or self._error is not None, timeout=timeout_s)
            batch, void_after = self._ready.pop(step, (None, 0.0))
            if batch is None and self._error is not None:
                raise self._error
        # measured on this machine's clock from the end of the draw: its ack would be refused, so it is not used at all
        if batch is not None and void_after <= time.monotonic():
            self.discard(step)
            return None
        return batch

    def _may_draw(self) -> bool:
        return self._next_step <= min(self._requested_step + self._ahead, self._last_step)

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._may_draw())
                step, drawn_in_round = self._next_step, self._round
            if self._closed.is_set():
                return
            try:
                batch = self._draw(step, LONG_POLL_S)
            except BusyError as error:  # no batch yet; the buffer names what it waits for
                self._wait_name = error.wait
                self._closed.wait(min(error.retry_after_s, 1.0))
                continue
            except WireError as error:
                if self._should_retry(step, error):
                    continue
                self._fail(
                    TbaError(
                        f"{MAX_DAMAGED} answers in a row to the request for the batch of step {step} were no batch "
                        f"({error}); run the same tba release on every service, and start the trainer again"
                    )
                )
                return
            except Exception as error:
                self._fail(error if isinstance(error, TbaError) else TbaError(f"drawing a batch failed: {error}"))
                return
            self._num_damaged_in_row = 0
            with self._changed:
                self._wait_name = "batch"
                if drawn_in_round == self._round:  # else `discard` came while this batch was on its way
                    self._ready[step] = (batch, time.monotonic() + self._batch_deadline_s)
                    self._next_step = step + 1
                    self._changed.notify_all()

    def _should_retry(self, step: int, error: WireError) -> bool:
        """Count a damaged answer; return whether the batch of the step is requested again."""
        self.num_damaged += 1
        self._num_damaged_in_row += 1
        log.warning("batch_damaged", step=step, num_in_row=self._num_damaged_in_row, error=str(error))
        self._closed.wait(_DAMAGED_PAUSE_S)
        return self._num_damaged_in_row < MAX_DAMAGED

    def _fail(self, error: Exception) -> None:
        """Make the loop raise an error at its next call."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
