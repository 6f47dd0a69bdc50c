"""Structured logs: an event name and key/values, one line per state change, with the service and run bound."""

from __future__ import annotations

import logging
import sys
from typing import Literal

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
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if console
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
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


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger with `source=name` bound."""
    return structlog.get_logger(source=name)
