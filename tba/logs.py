"""Structured logs: an event name and key/values, one line per state change, with the service and run bound."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import stamina.instrumentation
import structlog


def configure_logging(log_format: Literal["auto", "console", "json"], *, service: str, run: str) -> None:
    """Set up structlog for this process; uvicorn and other stdlib loggers go through the same pipe.

    A call that is retried logs one line when its first retry is due, and no more: what the retries come to, the
    caller says.

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
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, run_id=run)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    stamina.instrumentation.set_on_retry_hooks([_log_first_retry])


def silence_retries() -> None:
    """For the command line, which explains what a call came to in one sentence: retries print nothing."""
    stamina.instrumentation.set_on_retry_hooks([])


def _exceptions() -> structlog.typing.Processor:
    """Tracebacks without local variables: those may hold tokens, and are slow to show."""
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    return structlog.processors.ExceptionRenderer(transformer)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger with `source=name` bound."""
    return structlog.get_logger(source=name)


def _log_first_retry(details: stamina.instrumentation.RetryDetails) -> None:
    if details.retry_num == 1:
        get_logger("retries").warning("call_is_retried", error=str(details.caused_by))
