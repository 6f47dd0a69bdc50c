"""A fake reward service over real HTTP: a test decides its answers, and makes it absent, slow, busy or refusing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.support import loopback
from tests.support.redis_process import free_port

Item = dict[str, Any]
Answer = float | str
"""A reward, or the reason of an error."""


class RewardServer:
    """POST /v1/score and GET /v1/rewards.

    `score` answers one item; `version` is the version of every reward. While `gate` is cleared, requests are accepted
    and not answered. `refusal` can answer a whole request with another status and body.
    """

    def __init__(self) -> None:
        self.tasks = ["addition", "other"]
        self.version = "addition-2"
        self.score: Callable[[Item], Answer] = lambda item: 10.0
        self.parts: dict[str, float] | None = None
        """The parts of every reward."""
        self.refusal: Callable[[list[Item]], tuple[int, dict[str, Any]] | None] = lambda items: None
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[list[Item]] = []
        """The items of every accepted request, in order."""
        self.tokens: set[str | None] = set()
        self._server = self._listen(free_port())
        self.url = self._server.url

    @property
    def asked(self) -> list[Item]:
        """All items of accepted requests, in order."""
        return [item for items in self.requests for item in items]

    def leave(self) -> None:
        """Stop listening, so that new connections are refused."""
        self._server.close()

    def come_back(self) -> None:
        """Listen on the same port again."""
        self._server = self._listen(self._server.server_port)

    def stop(self) -> None:
        """Answer the requests that are held, and stop listening."""
        self.gate.set()
        self.leave()

    def _listen(self, port: int) -> loopback.Server:
        outer = self

        class Handler(loopback.Handler):
            def do_GET(self) -> None:
                info = {"version": outer.version, "health": "ok"}
                self.answer(200, {"rewards": [{"task": task, **info} for task in outer.tasks]})

            def do_POST(self) -> None:
                items = json.loads(self.body())["items"]
                outer.requests.append(items)
                outer.tokens.add(self.headers.get("authorization"))
                outer.gate.wait(60)
                reply = outer.refusal(items) or (200, {"results": [outer._result(item) for item in items]})
                with suppress(OSError):  # the client was killed
                    self.answer(*reply)

        return loopback.Server(Handler, port)

    def _result(self, item: Item) -> dict[str, Any]:
        answer = self.score(item)
        if isinstance(answer, str):
            return {"item_id": item["item_id"], "error": {"reason": answer, "detail": f"detail of {answer}"}}
        known = {} if self.parts is None else {"parts": self.parts}
        return {"item_id": item["item_id"], "reward": answer, "reward_version": self.version, **known}
