"""Methods that the engine calls in the processes with vLLM's model: vLLM mixes `WeightsExtension` into its worker."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tba.concurrency import begin_in_thread
from tba_searcher.engines.vllm.internals import WorkerModel
from tba_searcher.engines.vllm.weights import Entries, HostTensors, Loaded, SecondModel, Staging, load_files
from tba_searcher.engines.weight_check import file_stamps

WORKER_EXTENSION = f"{__name__}.WeightsExtension"
Failure = tuple[str, str, str]
"""Class, text and traceback of an exception."""


def _answers(method: Callable[..., Any]) -> Callable[..., tuple[Any, Failure | None]]:
    """Make a method return (result, None) or (None, failure) instead of raising.

    vLLM stops reading the ranks' answers at the first exception. It would take the unread answers as the answers to the
    next call.
    """

    @functools.wraps(method)
    def call(self: WeightsExtension, *args: Any) -> tuple[Any, Failure | None]:
        try:
            return method(self, *args), None
        except Exception as error:
            return None, (type(error).__name__, str(error), traceback.format_exc())

    return call


def _end_with_the_searcher() -> None:
    """Wait until the searcher's process has ended for any reason, then end this rank's process."""
    # vLLM's own end took half a minute, and one rank may wait for another, with memory that the next searcher needs
    searcher = multiprocessing.parent_process()
    if searcher is not None:
        searcher.join()
        os._exit(1)


class WeightsExtension:
    """Methods for vLLM's worker; `Workers.call` calls them, so arguments and results are plain values."""

    _tba_worker: WorkerModel
    _tba_staging: Staging | None = None
    _tba_staged: Future[None]
    _tba_in_use: Loaded = (None, ())

    @_answers
    def tba_open_staging(self, on_cpu: bool) -> str:
        """Prepare the worker for the other methods; the engine calls this once, before them.

        With several ranks, this process then ignores SIGTERM and SIGINT, and ends when the searcher ends.

        Returns:
            Why weights cannot be staged for this model; empty if they can.
        """
        self._tba_worker = worker = WorkerModel(self)
        if worker.num_ranks > 1:
            # in a process of its own: a signal to the whole group is for the searcher, which drains with the ranks
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            threading.Thread(target=_end_with_the_searcher, name="searcher-watch", daemon=True).start()
        try:
            self._tba_staging = SecondModel(worker) if on_cpu else HostTensors(worker)
        except RuntimeError as error:
            return str(error)
        return ""

    @_answers
    def tba_stage_weights(self, paths: dict[str, str]) -> None:
        """Start a thread that stages the tensors of `paths` (files by name) while vLLM generates; return at once."""
        staging, stamps = self._tba_staging, file_stamps(paths.values())
        self._tba_staged = begin_in_thread(lambda: None if staging is None else staging.stage(paths, stamps))

    @_answers
    def tba_is_staged(self) -> bool:
        """Return whether the last `tba_stage_weights` has ended; raise its error if it failed."""
        if not self._tba_staged.done():
            return False
        self._tba_staged.result()
        return True

    @_answers
    def tba_load_weights(self, paths: dict[str, str]) -> Entries:
        """Replace all parameters with the tensors of `paths` (files by tensor name); return this rank's entries."""
        stamps, before = file_stamps(paths.values()), self._tba_in_use
        self._tba_in_use = (None, ())
        worker = self._tba_worker
        entries = None if self._tba_staging is None else self._tba_staging.use(stamps, before)
        if entries is None:
            entries = load_files(worker, worker.model, paths)
        worker.forget_derived()
        self._tba_in_use = (stamps, entries)
        return entries
