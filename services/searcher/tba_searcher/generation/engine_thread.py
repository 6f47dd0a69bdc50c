"""The engine's own thread: the event loop hands it one `EngineStep` at a time and gets a `StepResult` back.

A step loads other weights, aborts requests, submits new ones, and then decodes for about `STEP_S`. If a part of it
fails, the result holds the reason and the completions that came before.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from tba.errors import TbaError
from tba.logs import get_logger
from tba.weights import LocalVersion
from tba_searcher.engines.engine import Completion, Engine, EngineDiedError, EngineError, Request
from tba_searcher.engines.weight_check import swap_weights
from tba_searcher.waits import WaitRegistry

STEP_S = 0.05
"""Decoding ends after this long, or when nothing is active."""
LONG_STEP_S = 5.0
"""A step that takes longer is shown as the wait `engine-step`."""
CLOSE_S = 5.0
"""Time for closing the engine; after that the process ends with the engine open."""
T = TypeVar("T")
log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The work that the event loop hands to the engine's thread at once."""

    swap_to: LocalVersion | None
    requests: Sequence[Request]
    aborts: Sequence[str] = ()
    """Ids of the requests to abort."""
    returns_early: bool = False
    """Whether the step ends with the first completions that leave a slot idle: episodes answer them with requests."""


@dataclass(slots=True)
class StepResult:
    """The outcome of an `EngineStep`."""

    completions: list[Completion] = field(default_factory=list)
    rejected: list[tuple[Request, EngineError]] = field(default_factory=list)
    """Requests that the engine cannot honour."""
    swap_error: TbaError | None = None
    """Why the new weights are not used."""
    swap_s: float = 0.0
    """How long decoding paused for the change of weights."""
    died: EngineDiedError | None = None
    """Why the engine cannot continue."""


class EngineThread:
    """Makes all calls of an engine in one daemon thread, one at a time and in order."""

    def __init__(self, waits: WaitRegistry, *, timeout_s: float) -> None:
        self._waits, self._timeout_s = waits, timeout_s
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, engine: Engine, step: EngineStep, current: LocalVersion) -> StepResult:
        """Run a step in the thread; if it takes longer than the timeout, return a result that calls the engine dead."""
        task = asyncio.ensure_future(self._call(lambda: run_step(engine, step, current)))
        try:
            while not (await asyncio.wait({task}, timeout=LONG_STEP_S))[0]:
                if self._waits.begin("engine", "engine-step", self._timeout_s - LONG_STEP_S) <= 0:
                    # the thread cannot be stopped: the caller delivers what is finished and ends the process
                    text = f"wait engine-step: the engine did not come back for {self._timeout_s:g} s"
                    return StepResult(died=EngineDiedError(text))
            return task.result()
        finally:
            task.cancel()
            self._waits.end("engine")

    async def close(self, engine: Engine) -> None:
        """Close the engine after the call in progress and end the thread; give up (and log) after `CLOSE_S`."""
        task = asyncio.ensure_future(self._call(engine.close))
        try:
            if not (await asyncio.wait({task}, timeout=CLOSE_S))[0]:
                log.warning("engine not closed", detail=f"no answer for {CLOSE_S:g} s")
            elif (error := task.exception()) is not None:
                log.warning("engine not closed", detail=f"{type(error).__name__}: {error}")
        finally:
            task.cancel()
            self._calls.put(None)

    async def _call(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not future.done():
                set_outcome(outcome)

        def work() -> None:
            try:
                outcome: tuple[Callable[[Any], None], Any] = future.set_result, call()
            except Exception as error:
                outcome = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the caller is gone
                loop.call_soon_threadsafe(settle, *outcome)

        if self._thread is None:
            # a daemon: an engine that hangs must not keep the process from ending
            self._thread = threading.Thread(target=self._run_calls, name="engine", daemon=True)
            self._thread.start()
        self._calls.put(work)
        return await future

    def _run_calls(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def run_step(engine: Engine, step: EngineStep, current: LocalVersion) -> StepResult:
    """Swap weights, abort, submit and decode; the engine's thread calls this.

    Args:
        current: the version to go back to when `step.swap_to` cannot be used.
    """
    result = StepResult()
    try:
        if step.swap_to is not None:
            begin = time.monotonic()
            result.swap_error = swap_weights(engine, step.swap_to, current)
            result.swap_s = time.monotonic() - begin
        # before new requests: aborted ones hold slots
        for request_id in step.aborts:
            engine.abort(request_id)
        for request in step.requests:
            try:
                engine.submit(request)
            except EngineDiedError:
                raise
            except EngineError as error:
                result.rejected.append((request, error))
        # a few milliseconds, so that heartbeats, aborts and new versions never wait long for the engine
        until = time.monotonic() + STEP_S
        while engine.num_active + engine.num_waiting:
            result.completions += engine.step()
            is_idle = step.returns_early and result.completions and not engine.num_waiting
            if is_idle or time.monotonic() > until:
                break
    except EngineDiedError as error:
        result.died = error
    except Exception as error:  # a defect of the engine must not cost finished rollouts
        log.error("engine failed", exc_info=True)
        result.died = EngineDiedError(f"the engine failed with {type(error).__name__}: {error}")
    return result
