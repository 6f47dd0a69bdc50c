"""Structured logs: an event name and key/values, one line per state change, with the service and run bound."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import stamina.instrumentation
import structlog


def configure_logging(log_format: Literal["auto", "console", "json"], *, service: str, run: str) -> None:
    """Set up structlog for this process; uvicorn and other stdlib loggers go through the same pipe.

    Args:
        log_format: `auto` is console on a terminal and JSON otherwise.
    """
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [_exceptions(), structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        # the configuration is final: loggers need not look it up for every line
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, run_id=run)
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
    """Print nothing about retries: the command line explains the outcome of a call in one sentence."""
    stamina.instrumentation.set_on_retry_hooks([])


@contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Print log lines to stderr within the block, where structlog is as it comes: stdout is for results."""
    before = structlog.get_config()["logger_factory"]
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        yield
    finally:
        structlog.configure(logger_factory=before)


def _exceptions() -> structlog.typing.Processor:
    """Return the renderer of tracebacks."""
    # without local variables: they may hold tokens, and are slow to render
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    return structlog.processors.ExceptionRenderer(transformer)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger with `source=name` bound."""
    return structlog.get_logger(source=name)


def _log_first_retry(details: stamina.instrumentation.RetryDetails) -> None:
    if details.retry_num == 1:
        get_logger("retries").warning("call_is_retried", error=str(details.caused_by))
