"""A connection to Redis that uvloop has already closed is a lost connection, not a defect of the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.exceptions import ConnectionError
from tba_buffer.storage.client import connect, redis_errors

from tba.config.redis import redis_access
from tba.errors import UnavailableError
from tests.support.buffer import make_recipe
from tests.support.redis_process import RedisProcess, start_redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis for one test, which ends its connections."""
    process = start_redis(tmp_path)
    yield process
    process.stop()


def run(redis: RedisProcess, check: Any) -> None:
    async def on_connect(connection: Any) -> None:
        await connection.on_connect()

    async def work() -> None:
        client = connect(redis_access(make_recipe(buffer={"redis_url": redis.url})), on_connect)
        try:
            await check(client)
        finally:
            await client.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


async def closed_under_its_hands(client: Any) -> Any:
    """A pooled connection whose transport is gone, as after a reset that nobody has read yet."""
    connection = await client.connection_pool.get_connection()
    connection._writer.transport.abort()
    for _ in range(10):
        await asyncio.sleep(0)
    return connection


def test_writing_to_it_is_a_connection_error(redis: RedisProcess) -> None:
    async def check(client: Any) -> None:
        connection = await closed_under_its_hands(client)
        with pytest.raises(ConnectionError, match="closed"):
            await connection.send_command("PING")
        await client.connection_pool.release(connection)

    run(redis, check)


def test_a_command_over_it_is_tried_again_and_without_redis_it_is_unavailable(redis: RedisProcess) -> None:
    async def check(client: Any) -> None:
        await client.connection_pool.release(await closed_under_its_hands(client))
        assert await client.ping()
        connection = await closed_under_its_hands(client)
        redis.kill()
        await client.connection_pool.release(connection)
        with pytest.raises(UnavailableError, match="Redis could not answer"), redis_errors("answer"):
            await client.ping()

    run(redis, check)
