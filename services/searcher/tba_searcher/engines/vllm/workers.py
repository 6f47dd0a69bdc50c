"""vLLM's workers, one per rank, and the one class through which the engine calls them.

With one rank the worker is an object of this process. With more, vLLM's multiprocess executor starts a process per rank
and broadcasts every call to all of them through shared memory:

    engine's thread    step, load ----+                        +--> rank 0: its slice of every tensor
                                      |  one call at a time    |
    staging thread     begin, poll ---+--> shared memory ------+--> rank 1: ...

All ranks run the same calls in the same order, so all of them change their weights between the same two steps.
"""

from __future__ import annotations

import multiprocessing.connection
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

from tba.logs import get_logger
from tba_searcher.engines.engine import EngineDiedError, EngineError
from tba_searcher.engines.vllm.internals import rank_processes, shut_down

_EXIT_S = 1.0
log = get_logger("vllm")


class Workers:
    """Calls vLLM's workers, one call at a time, and notices at once when one of their processes ends."""

    def __init__(self, llm: Any) -> None:
        self._llm: Any = llm
        # vLLM's queues to and from the ranks know no threads
        self._turn = threading.Lock()
        self._processes: Sequence[Any] = rank_processes(llm)
        self._ended = ""
        """Which process ended first, and how; empty while all run."""
        self._noting = threading.Lock()
        self._is_ending = False
        if self._processes:
            threading.Thread(target=self._end_ranks, name="vllm-ranks", daemon=True).start()

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks; empty if the only worker is in this process."""
        return [process.pid for process in self._processes]

    def step(self) -> list[Any]:
        """Run one step of vLLM's scheduler.

        Raises:
            EngineDiedError: vLLM failed, or a rank ended.
        """
        with self._turn:
            try:
                return self._llm.step()
            except Exception as error:
                raise self._died(error, "decoding") from error

    def call(self, method: str, *args: Any, doing: str) -> list[Any]:
        """Call a method of `WeightsExtension` on every rank; return the results by rank. `doing` is for error messages.

        Raises:
            EngineError: the method failed on a rank; the other ranks have finished it.
            EngineDiedError: a rank is out of memory, or ended.
        """
        with self._turn:
            try:
                answers = self._llm.collective_rpc(method, args=args)
            except Exception as error:
                raise self._died(error, doing) from error
        failures = [(rank, failure) for rank, (_, failure) in enumerate(answers) if failure is not None]
        for rank, (kind, text, trace) in failures:
            log.warning("vllm_worker_failed", doing=doing, rank=rank, reason=f"{kind}: {text}", traceback=trace)
        if failures:
            rank, (kind, text, _) = failures[0]
            where = f"rank {rank} of {len(answers)}: " if self._processes else ""
            if _is_out_of_memory(kind, text):
                raise EngineDiedError(f"vLLM is out of memory while {doing}: {where}{kind}: {text}")
            raise EngineError(f"vLLM failed while {doing}: {where}{kind}: {text}")
        return [result for result, _ in answers]

    def close(self) -> None:
        """Kill the ranks' processes and shut down vLLM's engine."""
        with self._noting:
            self._is_ending = True
        for process in self._processes:
            process.kill()  # vLLM would wait for up to 9 s, and they hold nothing that could be lost
        shut_down(self._llm)
        self._llm = None

    def _end_ranks(self, timeout_s: float | None = None) -> None:
        """Wait until a rank's process ends, at most `timeout_s`; note which one, then kill all others.

        The others may wait for the dead rank in a collective operation, where no signal but SIGKILL reaches them.
        """
        sentinels = [process.sentinel for process in self._processes]
        ended = multiprocessing.connection.wait(sentinels, timeout_s)
        with self._noting:
            if self._is_ending:
                return
            if ended and not self._ended:
                rank = sentinels.index(cast(int, ended[0]))
                code = _exit_code(self._processes[rank], _EXIT_S)
                how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
                self._ended = f"rank {rank} of {len(sentinels)} ended with {how}; "
            self._is_ending = True  # those killed now ended for no reason of their own
            for process in self._processes:
                process.kill()

    def _died(self, error: Exception, doing: str) -> EngineDiedError:
        # vLLM calls the end of a rank "cancelled", or fails an assertion. After other errors the queues of the ranks
        # may hold answers that nobody has read. A rank may also say that another is gone before that one has ended.
        if self._processes:
            self._end_ranks(_EXIT_S)
        kind, text = type(error).__name__, str(error)
        what = "is out of memory" if _is_out_of_memory(kind, text) else "crashed"
        return EngineDiedError(f"vLLM {what} while {doing}: {self._ended}{kind}: {text}")


def _exit_code(process: Any, timeout_s: float) -> int | None:
    """Return the exit code of a process whose pipes have closed; None if it is not known within `timeout_s`.

    The pipes close a moment before there is an exit code. `Process.join` cannot wait for it: a vLLM thread waits for
    the same process, and may have taken the code without having stored it yet. Then `join` returns at once without one.
    """
    until_s = time.monotonic() + timeout_s
    while (code := cast("int | None", process.exitcode)) is None and time.monotonic() < until_s:
        time.sleep(0.01)
    return code


def _is_out_of_memory(kind: str, text: str) -> bool:
    """Return whether an exception of this class name and text means out of memory; the engine must end then."""
    return kind in ("MemoryError", "OutOfMemoryError") or "out of memory" in text
