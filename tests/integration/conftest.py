"""Fixtures of this folder: a real Redis, buffers over it, reward services, a tiny model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis

from tba.tokens import TokensFile
from tests.support.browser import chromium
from tests.support.buffer import make_prompts, make_recipe
from tests.support.buffer_fixtures import BufferThread, ServeBuffer, StartService, without_constants
from tests.support.redis_process import RedisProcess, start_redis
from tests.support.reward_process import running_reward
from tests.support.reward_server import RewardServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """One real Redis for the tests of a file."""
    process = start_redis(tmp_path_factory.mktemp("redis"))
    yield process
    process.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a file."""
    with chromium() as started:
        yield started


@pytest.fixture
def raw(redis: RedisProcess) -> Iterator[Redis]:
    """A client of that Redis."""
    with Redis.from_url(redis.url) as client:
        yield client


@pytest.fixture
def serve_buffer(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeBuffer]:
    """Call it with recipe sections to serve a buffer over an empty Redis; again to serve one more over the same.

    A name in capitals in the section of the buffer is a constant of the service.
    """
    with Redis.from_url(redis.url) as client:
        client.flushall()
    started: list[BufferThread] = []

    def serve(*, tokens: dict[str, str] | TokensFile | None = None, **sections: Any) -> BufferThread:
        sections["buffer"] = {"redis_url": redis.url, **without_constants(monkeypatch, sections.get("buffer", {}))}
        started.append(BufferThread(make_recipe(**sections), tokens))
        return started[-1]

    yield serve
    for buffer in started:
        buffer.stop()


@pytest.fixture
async def start_service(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartService]:
    """Call it with recipe sections to start a buffer without HTTP over an empty Redis; again for one more over it.

    A name in capitals in the section of the buffer is a constant of the service.
    """
    from prometheus_client import CollectorRegistry
    from tba_buffer.service import Buffer

    started: list[Buffer] = []

    async def start(*, num_prompts: int = 4, clock: Callable[[], float] = time.time, **sections: Any) -> Buffer:
        sections["buffer"] = {"redis_url": redis.url, **without_constants(monkeypatch, sections.get("buffer", {}))}
        buffer = Buffer(make_recipe(**sections), CollectorRegistry(), clock=clock)
        if not started:
            await buffer.context.redis.flushall()
        started.append(buffer)
        await buffer.start()
        if num_prompts:
            await buffer.catalog.upload(make_prompts(num_prompts))
        return buffer

    yield start
    for buffer in started:
        await buffer.stop()


@pytest.fixture
def reward() -> Iterator[RewardServer]:
    """A reward service that gives 10 for everything."""
    server = RewardServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def reward_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running reward service."""
    with running_reward(tmp_path_factory.mktemp("reward"), num_workers=1) as url:
        yield url


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for the tests of a file."""
    from tests.support.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32)
