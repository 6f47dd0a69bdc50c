"""Fixtures over a real Redis and a buffer that serves real HTTP from a thread: import `redis` and `serve_buffer`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from tba.clients import BufferClient
from tba.config import Recipe
from tests.support.buffer import make_recipe
from tests.support.redis_process import RedisProcess, start_redis


class BufferThread:
    """A buffer that serves from a thread of this process, on a port of its own."""

    def __init__(self, recipe: Recipe, tokens: dict[str, str] | None = None) -> None:
        from tba_buffer.app import build_app

        from tba.service.protocol import BoundedHttpProtocol
        from tba.service.serve import bind

        self.recipe = recipe
        self._clients: list[BufferClient] = []
        self._socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            build_app(recipe, tokens),
            http=BoundedHttpProtocol,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            loop="asyncio",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the buffer did not start")
            time.sleep(0.01)

    def client(self, *, token: str | None = None, retry_s: float = 0.0) -> BufferClient:
        """A client that, by default, does not retry."""
        self._clients.append(BufferClient(self.url, token=token, retry_s=retry_s))
        return self._clients[-1]

    def hold_little(self) -> None:
        """From now on the system holds little of what a client has not read."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Close the clients and end the thread."""
        for client in self._clients:
            client.close()
        self._server.should_exit = True
        self._thread.join(timeout=20)
        self._socket.close()


ServeBuffer = Callable[..., BufferThread]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """One real Redis for the tests of a file."""
    process = start_redis(tmp_path_factory.mktemp("redis"))
    yield process
    process.stop()


@pytest.fixture
def serve_buffer(redis: RedisProcess) -> Iterator[ServeBuffer]:
    """Call it with recipe sections to serve a buffer over an empty Redis; again to serve one more over the same."""
    from redis import Redis as Client

    with Client.from_url(redis.url) as client:
        client.flushall()
    started: list[BufferThread] = []

    def serve(*, tokens: dict[str, str] | None = None, **sections: Any) -> BufferThread:
        sections["buffer"] = {"redis_url": redis.url, **sections.get("buffer", {})}
        started.append(BufferThread(make_recipe(**sections), tokens))
        return started[-1]

    yield serve
    for buffer in started:
        buffer.stop()
