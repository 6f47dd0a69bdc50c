"""An environment at an address, asked by HTTP; server.py is the other side.

    POST /reset  {episode_id, seed, data}                  -> {messages, tools}: JSON schemas of tools
    POST /step   {episode_id, turn, reply}                 -> {messages, reward, done, info}
    POST /close  {episode_id}                              -> {}
    GET  /       -> {version}

A request that got no answer is sent again, at most NUM_RETRIES times. The server keeps the last answer of an episode by
its turn, so no step and no tool call is made twice. A failure is {boundary, detail} with status 502.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from uuid import uuid4

import urllib3

from tba.environments.protocol import Boundary, EpisodeError, Reply, Reset, Step

NUM_RETRIES = 3
BOUNDARIES = ("tool", "sandbox", "judge")
"""What a server may name; all else is the environment's."""
CONNECT_S = 5.0
_http = urllib3.PoolManager(
    maxsize=256, retries=urllib3.Retry(NUM_RETRIES, redirect=0, backoff_factor=0.2, allowed_methods=None)
)


def document_of(reply: Reply) -> dict[str, Any]:
    """Return a reply as JSON."""
    calls = [{"raw": c.raw, "status": c.status, "name": c.name, "arguments": c.arguments} for c in reply.tool_calls]
    return {"content": reply.content, "reasoning": reply.reasoning, "tool_calls": calls}


class RemoteEnvironment:
    """Implements `Environment` with an address."""

    def __init__(self, url: str) -> None:
        self._url, self._episode_id, self._turn = url.rstrip("/"), uuid4().hex, 0

    def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Begin the episode."""
        answer = self._ask("reset", seed=seed, data=dict(data))
        return Reset(answer.get("messages", []), answer.get("tools", []))

    def step(self, reply: Reply) -> Step:
        """Answer a reply."""
        self._turn += 1
        answer = self._ask("step", turn=self._turn, reply=document_of(reply))
        return Step(answer.get("messages", []), answer.get("reward"), answer.get("done", False), answer.get("info", {}))

    def close(self) -> None:
        """End the episode."""
        self._ask("close")

    def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        return ask(self._url, "POST", f"/{method}", {"episode_id": self._episode_id, **arguments})


def ask(url: str, verb: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object that an environment's server answers; raise EpisodeError if it fails or is away."""
    timeout = urllib3.Timeout(connect=CONNECT_S, read=None)  # the deadline of a turn is the runner's
    try:
        reply = _http.request(verb, f"{url}{path}", json=body, timeout=timeout)
        answer = reply.json()
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        raise EpisodeError(f"{url}{path}: {type(error).__name__}: {error}") from None
    if not isinstance(answer, dict) or reply.status != 200:
        found = answer if isinstance(answer, dict) else {}
        boundary: Boundary = cast(
            "Boundary", named if (named := found.get("boundary")) in BOUNDARIES else "environment"
        )
        detail = found.get("detail") or reply.data[:200].decode(errors="replace")
        raise EpisodeError(f"{url}{path}: status {reply.status}: {detail}", boundary=boundary)
    return answer
