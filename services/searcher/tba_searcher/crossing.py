"""Between the event loop and the engine: one thread of the engine's own, and what it does each time it is called.

A turn is: load other weights, forget requests, take new ones, then a few steps. Nothing that goes wrong in it is lost:
completions that came before are in the result beside the reason.
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
from tba_searcher.engines.base import Completion, Engine, EngineDiedError, EngineError, Request
from tba_searcher.pulling import Pulled, swap
from tba_searcher.waits import Waits

TURN_S = 0.02
"""A turn ends after this long, or when nothing is active."""
LONG_TURN_S = 5.0
"""A turn that takes longer is a wait with a name."""
CLOSE_S = 5.0
"""For closing the engine; after that the process ends without."""
T = TypeVar("T")
log = get_logger("crossing")


@dataclass(frozen=True, slots=True)
class Turn:
    """What the engine is asked to do."""

    swap_to: Pulled | None
    requests: Sequence[Request]
    aborts: Sequence[str] = ()


@dataclass(slots=True)
class TurnResult:
    """What came of it."""

    completions: list[Completion] = field(default_factory=list)
    rejected: list[tuple[Request, EngineError]] = field(default_factory=list)
    """Requests that the engine cannot honour."""
    swap_refused: TbaError | None = None
    """Why the new weights are not used."""
    swap_s: float = 0.0
    """How long no token was made because of the new weights."""
    died: EngineDiedError | None = None
    """The engine cannot go on."""


def run_turn(engine: Engine, turn: Turn, current: Pulled) -> TurnResult:
    """In the engine's thread: swap, abort, submit, then a few steps.

    Args:
        current: the version to go back to when `turn.swap_to` cannot be used.
    """
    result = TurnResult()
    try:
        if turn.swap_to is not None:
            begin = time.monotonic()
            result.swap_refused = swap(engine, turn.swap_to, current)
            result.swap_s = time.monotonic() - begin
        for request_id in turn.aborts:
            engine.abort(request_id)
        for request in turn.requests:
            try:
                engine.submit(request)
            except EngineDiedError:
                raise
            except EngineError as error:
                result.rejected.append((request, error))
        until = time.monotonic() + TURN_S
        while engine.num_active + engine.num_waiting:
            result.completions += engine.step()
            if time.monotonic() > until:
                break
    except EngineDiedError as error:
        result.died = error
    except Exception as error:  # a defect of the engine costs no finished rollout either
        log.error("engine failed", exc_info=True)
        result.died = EngineDiedError(f"the engine failed with {type(error).__name__}: {error}")
    return result


class EngineThread:
    """A daemon thread that makes one call at a time, in order; it starts with the first.

    Args:
        waits: a turn that takes long is shown there as `engine-turn`.
        timeout_s: deadline of a turn.
    """

    def __init__(self, waits: Waits, *, timeout_s: float) -> None:
        self._waits, self._timeout_s = waits, timeout_s
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def turn(self, engine: Engine, turn: Turn, current: Pulled) -> TurnResult:
        """A turn; one that does not come back in time is the death of the engine."""
        task = asyncio.ensure_future(self._call(lambda: run_turn(engine, turn, current)))
        try:
            while not (await asyncio.wait({task}, timeout=LONG_TURN_S))[0]:
                if self._waits.begin("engine", "engine-turn", self._timeout_s - LONG_TURN_S) <= 0:
                    text = f"wait engine-turn: the engine did not come back for {self._timeout_s:g} s"
                    return TurnResult(died=EngineDiedError(text))
            return task.result()
        finally:
            task.cancel()
            self._waits.end("engine")

    async def close(self, engine: Engine) -> None:
        """Close the engine after the call under way, if that comes back in time; the thread ends."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, *outcome)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        self._calls.put(work)
        return await future

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
