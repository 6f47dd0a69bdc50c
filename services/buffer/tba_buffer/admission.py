"""Admission: how many bytes of push bodies this process holds at once, so that searchers cannot exhaust its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from tba.config import Recipe
from tba.errors import BusyError

RETRY_S = 0.5


class Admission:
    """Counts the bodies that are being read or stored. A body that is alone is always admitted.

    Args:
        recipe: its `buffer` section sets the limits.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._max_inflight_bytes = recipe.buffer.max_inflight_bytes
        self._max_body_bytes = recipe.buffer.max_body_bytes
        self.inflight_bytes = 0

    @contextmanager
    def body(self, request: Request) -> Iterator[None]:
        """Before the body is read, until it is stored; a body of unknown size counts as the largest that is allowed.

        Raises:
            BusyError: too much is under way (wait "push-memory"); nothing of the body was read.
        """
        declared = request.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdigit() else self._max_body_bytes
        if self.inflight_bytes and self.inflight_bytes + num_bytes > self._max_inflight_bytes:
            raise BusyError(
                f"{self.inflight_bytes} bytes of pushes are under way and this one has up to {num_bytes}, the limit is "
                f"{self._max_inflight_bytes} (buffer.max_inflight_bytes); push it again",
                retry_after_s=RETRY_S,
                wait="push-memory",
            )
        self.inflight_bytes += num_bytes
        try:
            yield
        finally:
            self.inflight_bytes -= num_bytes
