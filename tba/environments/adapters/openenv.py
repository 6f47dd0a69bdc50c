"""A server of OpenEnv: `settings = {url = "http://127.0.0.1:8000", action = "message", text = "prompt"}`.

`action` is the field of an action that takes the reply, `text` the field of an observation that is the next message;
without it, the whole observation is, as JSON. An episode is a session of `/ws`: each request to `/reset` or `/step`
makes an environment of its own. The server must allow a session (`max_concurrent_envs`) for each open episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from tba.environments.adapters import required
from tba.environments.protocol import EpisodeError, Reply, Reset, Step


class OpenEnv:
    """Implements `Environment` with a session of a server."""

    def __init__(self, url: str, action: str = "message", text: str | None = None) -> None:
        self._client, self._session = required("websockets.sync.client", "websockets"), cast("Any", None)
        self._url, self._action, self._text = f"ws{url.removeprefix('http').rstrip('/')}/ws", action, text

    def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Begin a session; seed and data of the prompt are the arguments of the server's `reset`."""
        self._session = self._client.connect(self._url, max_size=None, proxy=None)
        return Reset(self._ask("reset", {**data, "seed": seed}).messages)

    def step(self, reply: Reply) -> Step:
        """Send a reply as an action."""
        return self._ask("step", {self._action: reply.content})

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Step:
        with suppress(Exception):  # a server that is full has closed, and `recv` tells why
            self._session.send(json.dumps({"type": kind, "data": data}))
        found = json.loads(self._session.recv())["data"]
        if "observation" not in found:
            raise EpisodeError(f"{self._url}: {kind}: {found.get('code')}: {found.get('errors') or found}")
        seen = {key: value for key, value in found["observation"].items() if value not in (None, "", [], {})}
        text = json.dumps(seen, ensure_ascii=False) if self._text is None else seen.get(self._text)
        return Step([] if text is None else [text], found["reward"], found["done"])
