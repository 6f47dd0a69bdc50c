"""A buffer that serves real HTTP from a thread of the test, and copies of the Redis behind it."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import pytest
from tba_buffer.service import Buffer
from tba_buffer.storage.redis_client import BytesRedis

from tba.api import LineageReply
from tba.clients import BufferClient
from tba.config import Recipe
from tba.tokens import TokensFile
from tests.support.buffer import begin_run, make_prompts
from tests.support.waits import DEADLINE_S

_served: dict[str, BufferThread] = {}
"""The running buffers by URL."""


class BufferThread:
    """A buffer that serves from a thread of this process, on its own port.

    Its wall clock is `ahead_s` seconds ahead of this machine's clock.
    """

    def __init__(self, recipe: Recipe, tokens: dict[str, str] | TokensFile | None = None) -> None:
        from tba_buffer.api.app import build_app
        from tba_buffer.service import Buffer

        from tba.server.serve import Server, bind

        self.recipe, self.ahead_s = recipe, 0.0
        self._clients: list[BufferClient] = []
        self._socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        _served[self.url] = self
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tba_buffer.api.app.Buffer", partial(Buffer, clock=lambda: time.time() + self.ahead_s))
            app = build_app(recipe, tokens)
        self._server = Server(app, timeout_graceful_shutdown=1, loop="asyncio")
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the buffer did not start")
            time.sleep(0.01)

    def client(self, *, token: str | None = None, retry_s: float = 0.0) -> BufferClient:
        """Return a new client, which by default does not retry."""
        self._clients.append(BufferClient(self.url, token=token, retry_s=retry_s))
        return self._clients[-1]

    def begin(self, num_train: int, num_heldout: int = 0, *, per_prompt: int = 0) -> tuple[BufferClient, LineageReply]:
        """Begin a run as `begin_run` does."""
        client = self.client()
        return client, begin_run(client, num_train, num_heldout, per_prompt=per_prompt)

    def with_prompts(self, num_train: int, num_heldout: int = 0) -> BufferClient:
        """A client that has uploaded so many prompts."""
        client = self.client()
        client.upload_prompts(make_prompts(num_train, num_heldout))
        return client

    def hold_little(self) -> None:
        """Shrink the socket's send buffer, so that the system holds little data that a client has not read."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)

    def stop(self) -> None:
        """Close the clients, stop the server and end its thread."""
        for client in self._clients:
            client.close()
        self._server.should_exit = True
        self._thread.join(timeout=20)
        self._socket.close()
        _served.pop(self.url, None)


async def copy_of(redis: BytesRedis) -> dict[bytes, bytes]:
    """Return a copy of everything in Redis, for `go_back`: key -> serialized value."""
    return {name: await redis.dump(name) for name in await redis.keys("*")}


async def go_back(redis: BytesRedis, copy: Mapping[bytes, bytes]) -> None:
    """Replace everything in Redis by a copy: later changes are lost, as after a crash."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.flushall()
        for name, value in copy.items():
            pipe.restore(name, 0, value)
        await pipe.execute()


def later(client: BufferClient, seconds: float) -> None:
    """Set the wall clock of the client's buffer ahead, so that deadlines pass without waiting for them."""
    _served[client.base_url].ahead_s += seconds


def set_constant(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """Patch a constant of the buffer in every module of the buffer that has it."""
    import tba_buffer.service

    modules = [module for path, module in sys.modules.items() if path.startswith(tba_buffer.__name__)]
    holders = [module for module in modules if hasattr(module, name)]
    assert holders, f"no module of the buffer has a constant {name}"
    for module in holders:
        monkeypatch.setattr(module, name, value)


def without_constants(monkeypatch: pytest.MonkeyPatch, section: dict[str, Any]) -> dict[str, Any]:
    """Change the constants that stand among settings of the buffer; return the settings."""
    for name in filter(str.isupper, section):
        set_constant(monkeypatch, name, section[name])
    return {name: value for name, value in section.items() if not name.isupper()}


ServeBuffer = Callable[..., BufferThread]
StartService = Callable[..., Awaitable["Buffer"]]
