"""Structured logs: every line has a time, an event name, the run, and further keys and values."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import stamina.instrumentation
import structlog

from tba.tls import with_bare_urls

MAX_REPEATS, REPEAT_WINDOW_S = 10, 60.0
"""Most warnings of one event that are printed in REPEAT_WINDOW_S seconds."""


LOG_FORMAT_ENV = "TBA_LOG_FORMAT"
"""Environment variable with the log format, `console` or `json`. Default: console on a terminal, JSON otherwise."""


def configure_logging(*, service: str, run: str) -> None:
    """Set up structlog for this process, with lines on stderr; loggers of the standard library get the same format."""
    word = os.environ.get(LOG_FORMAT_ENV)
    console = word == "console" or (word != "json" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # not by context variables, which a new thread does not inherit
        _in_order({"service": service, "run_id": run}),
    ]
    # tracebacks without local variables: they may hold tokens, and are slow to render
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    last: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[RepeatLimit(), *shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # a line and its end in one write: lines of several threads and of the standard library do not mix
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        # the configuration is final: loggers need not look it up for every line
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # uvicorn and other libraries log by the standard library: their lines look like ours
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    # one line per call, at its first retry: the caller reports how the retries end
    stamina.instrumentation.set_on_retry_hooks([_log_first_retry])


def silence_retries() -> None:
    """Stop logging retries of calls in this process. Commands call this: they print the outcome in one sentence."""
    stamina.instrumentation.set_on_retry_hooks([])


@contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Print logs to stderr inside the `with` block; structlog's default, before `configure_logging`, is stdout."""
    before = structlog.get_config()["logger_factory"]
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        yield
    finally:
        structlog.configure(logger_factory=before)


class RepeatLimit:
    """A structlog processor that drops warnings beyond `max_repeats` of one event in `window_s` seconds. The first
    warning of the event in the next window has the number of dropped ones as `num_dropped`."""

    def __init__(
        self,
        max_repeats: int = MAX_REPEATS,
        window_s: float = REPEAT_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_repeats, self._window_s, self._clock = max_repeats, window_s, clock
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}
        """(source, event) -> start time of the window, number of warnings in it; the keys are constants in the code."""
        self._lock = threading.Lock()

    def __call__(
        self, logger: structlog.typing.WrappedLogger, method: str, line: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Return the line (see `structlog.typing.Processor`).

        Raises:
            structlog.DropEvent: the line is a warning beyond the limit.
        """
        if method != "warning":
            return line
        key, now_s = (str(line.get("source")), str(line["event"])), self._clock()
        with self._lock:
            start_s, num = self._windows.get(key, (now_s, 0))
            dropped = 0
            if now_s - start_s >= self._window_s:
                start_s, num, dropped = now_s, 0, max(0, num - self._max_repeats)
            self._windows[key] = start_s, num + 1
        if num >= self._max_repeats:
            raise structlog.DropEvent
        return {**line, "num_dropped": dropped} if dropped else line


def _in_order(bound: dict[str, str]) -> structlog.typing.Processor:
    """Return a structlog processor that adds `bound` to every line, after time, level, event and source."""

    def order(
        logger: structlog.typing.WrappedLogger, method: str, line: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        first = {name: line.pop(name) for name in ("timestamp", "level", "event", "source") if name in line}
        return with_bare_urls({**first, **bound, **line})  # errors of libraries name the address that they asked

    return order


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger with `source=name` bound."""
    return structlog.get_logger(source=name)


def _log_first_retry(details: stamina.instrumentation.RetryDetails) -> None:
    if details.retry_num == 1:
        get_logger("retries").warning("call_is_retried", error=str(details.caused_by))
