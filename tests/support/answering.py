"""A real HTTP server with prepared answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support import loopback

Answer = tuple[int, Any]
"""Status and body: bytes, or a JSON document."""


@contextmanager
def answering(answers: list[Answer]) -> Iterator[tuple[str, list[str]]]:
    """Run a server that gives these answers in turn and repeats the last one; yield its URL and the requested paths.

    A test may append more answers meanwhile.
    """
    asked: list[str] = []

    class Handler(loopback.Handler):
        def do_POST(self) -> None:
            status, body = answers[min(len(asked), len(answers) - 1)]
            asked.append(self.path)
            self.body()
            self.answer(status, body, {"location": "/elsewhere"} if status == 307 else None)

        do_GET = do_POST

    with loopback.Server(Handler) as server:
        yield server.url, asked
