"""A server with vLLM's routes that generates nothing: it answers with token 5, and fails as a test asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.support import loopback

Answer = tuple[int, Any]
"""Status and document."""


class FakeServer:
    """Serves on loopback. `change` gets path, body and answer, and returns the answer to send, or None to hang up."""

    def __init__(self) -> None:
        self.change: Callable[[str, dict[str, Any], Answer], Answer | None] = lambda path, body, answer: answer
        self.label = "default"
        self.token = "token-of-the-fake-server"
        self.prompt_logprob = -1.5
        """Log-prob of every prompt token at temperature 1."""
        self.bodies: list[dict[str, Any]] = []
        """Bodies of all requests for completions, except those for the log-probs of a prompt."""
        self.resets: list[str] = []
        """The queries of `/reset_prefix_cache`."""
        self._server = loopback.Server(type("Handler", (_Handler,), {"fake": self}))
        self.url = self._server.url

    def close(self) -> None:
        """Stop the server: open connections get no answer, and new ones are refused."""
        self.change = lambda path, body, answer: None
        self._server.close()

    def answer(self, path: str, body: dict[str, Any]) -> Answer | None:
        """Return the answer to a request after `change`; None: hang up."""
        if path == "/update_weight_version":
            self.label = body["new_version"]
        answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 512}]},
            "/weight_info": {"weight_version": self.label},
            "/get_world_size": {"world_size": 1},
            "/reset_prefix_cache": {"success": True},
        }
        found = self._completion(body) if path == "/v1/completions" else answers.get(path, {})
        return self.change(path, body, (200, found))

    def _completion(self, body: dict[str, Any]) -> Any:
        if "prompt_logprobs" in body:
            rows = [None, *({str(token): {"logprob": self.prompt_logprob}} for token in body["prompt"][1:])]
            return {"choices": [{"token_ids": [5], "prompt_logprobs": rows}]}
        self.bodies.append(body)
        return completion(body["max_tokens"], logprob=0.0 if body["top_k"] == 1 else -0.5)


def completion(num_tokens: int, *, logprob: float = -0.5, finish_reason: str = "length") -> Any:
    """Return the body of a completion: `num_tokens` times token 5."""
    return {
        "choices": [
            {
                "token_ids": [5] * num_tokens,
                "logprobs": {"token_logprobs": [logprob] * num_tokens},
                "finish_reason": finish_reason,
                "stop_reason": None,
            }
        ]
    }


class _Handler(loopback.Handler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.body() or b"{}")
        answer: Answer | None = (401, {"error": {"message": "Unauthorized"}})
        if self.headers.get("authorization") == f"Bearer {self.fake.token}":
            target = urlsplit(self.path)
            if target.path == "/reset_prefix_cache":
                self.fake.resets.append(target.query)
            answer = self.fake.answer(target.path, body)
        if answer is None:
            self.close_connection = True
            return
        with suppress(ConnectionError):  # the client has given up
            self.answer(*answer, {"content-type": "application/json"})

    do_GET = do_POST
