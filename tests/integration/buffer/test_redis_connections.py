"""Connections to Redis: shared by many callers, closed by the other side."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError, TimeoutError
from tba_buffer.storage.redis_client import MultiplexedConnection, connect, redis_errors

from tba.config.redis import RedisAccess
from tba.errors import UnavailableError
from tests.support.redis_process import RedisProcess, start_redis


async def nothing_more(connection: Any) -> None:
    await connection.on_connect()


async def no_handshake(connection: Any) -> None:
    connection._parser.on_connect(connection)


def reading_tasks() -> set[asyncio.Task[Any]]:
    """The readers of shared connections that are still at work."""
    return {task for task in asyncio.all_tasks() if task.get_name() == "redis-multiplexed"}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis for one test, which ends its connections."""
    process = start_redis(tmp_path)
    yield process
    process.stop()


@contextmanager
def silent(redis: RedisProcess) -> Iterator[None]:
    """It neither reads nor answers meanwhile."""
    redis.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        redis.process.send_signal(signal.SIGCONT)


@pytest.fixture
async def client(redis: RedisProcess) -> AsyncIterator[Redis]:
    connected = connect(RedisAccess(redis.url), nothing_more)
    yield connected
    await connected.aclose()


@pytest.fixture
async def line(client: Redis) -> AsyncIterator[MultiplexedConnection]:
    shared = MultiplexedConnection(client)
    yield shared
    await shared.aclose()


async def test_calls_at_once_get_their_own_replies(client: Redis, line: MultiplexedConnection) -> None:
    payloads = {f"key-{i}": bytes([i]) * (10 if i % 3 else 300_000) for i in range(60)}

    async def write_and_read(key: str, payload: bytes) -> None:
        assert await line.run(("SET", key, payload)) == [b"OK"]
        assert await line.run(("GET", key), ("STRLEN", key)) == [payload, len(payload)]

    await asyncio.gather(*(write_and_read(key, payload) for key, payload in payloads.items()))
    others = [info for info in await client.client_list() if not info["cmd"].startswith("client")]
    assert len(others) == 1  # all of it over one connection


async def test_an_error_reply_is_raised_where_it_belongs(line: MultiplexedConnection) -> None:
    await line.run(("SET", "text", "x"))
    other = asyncio.create_task(line.run(("ECHO", "y")))
    with pytest.raises(ResponseError, match="not an integer"):
        await line.run(("GET", "text"), ("INCR", "text"), ("APPEND", "text", "z"))
    assert await line.run(("GET", "text")) == [b"xz"]
    assert await other == [b"y"]


async def test_what_cannot_be_sent_disturbs_nobody(line: MultiplexedConnection) -> None:
    with pytest.raises(UnicodeEncodeError):
        await line.run(("GET", "x"), ("GET", "\ud800"))
    with pytest.raises(TypeError):
        await line.run(("GET", None))  # pyright: ignore[reportArgumentType]
    assert await line.run(("ECHO", "x")) == [b"x"]


async def test_a_caller_that_gives_up_leaves_the_others_alone(line: MultiplexedConnection) -> None:
    tasks = [asyncio.create_task(line.run(("ECHO", str(i)))) for i in range(50)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    for i, reply in enumerate(replies):
        assert isinstance(reply, asyncio.CancelledError) or reply == [str(i).encode()]
    assert all(replies[i] == [str(i).encode()] for i in range(1, 50, 2))


async def test_a_caller_that_gives_up_half_way_through_a_write_leaves_the_others_alone(
    client: Redis, line: MultiplexedConnection, redis: RedisProcess
) -> None:
    """A stopped Redis takes a part of the 30 MB; the rest waits in this process when its caller leaves."""
    await line.run(("SET", "counter", "1"))
    with silent(redis):
        before = asyncio.create_task(line.run(("INCR", "counter")))
        large = asyncio.create_task(line.run(("SET", "large", bytes(30_000_000))))
        for _ in range(10):  # turns of the event loop: what the socket takes is written
            await asyncio.sleep(0)
        after = asyncio.create_task(line.run(("INCRBY", "counter", "10"), ("STRLEN", "large")))
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
    assert (await before, await after) == ([2], [12, 30_000_000])  # each ran once, in order
    others = [info for info in await client.client_list() if not info["cmd"].startswith("client")]
    assert len(others) == 1


async def test_the_last_caller_to_leave_a_late_connection_closes_it(
    line: MultiplexedConnection, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call expires, then the other is cancelled, while Redis still says nothing."""
    await line.run(("PING",))
    with silent(redis):
        patient = asyncio.create_task(line.run(("PING",)))
        await asyncio.sleep(0)
        monkeypatch.setattr("tba_buffer.storage.redis_client.SOCKET_TIMEOUT_S", 0.2)
        with pytest.raises(TimeoutError):
            await line.run(("PING",))
        (reading,) = reading_tasks()
        patient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient
        await asyncio.wait([reading], timeout=10)
        assert reading.done()


async def test_closing_also_ends_connections_that_wait_for_late_replies(
    client: Redis, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = MultiplexedConnection(client)
    await line.run(("PING",))
    with silent(redis):
        patient = asyncio.create_task(line.run(("BLPOP", "nothing", "0"), ("SET", "large", bytes(30_000_000))))
        await asyncio.sleep(0)
        monkeypatch.setattr("tba_buffer.storage.redis_client.SOCKET_TIMEOUT_S", 0.2)
        with pytest.raises(TimeoutError):
            await line.run(("PING",))
        await line.aclose()
        assert not reading_tasks()
        with pytest.raises(ConnectionError):
            await patient


async def test_a_connection_that_ends_in_the_middle_of_the_replies_is_replaced_and_both_are_asked_again() -> None:
    """The first connection gets one reply and half of the next; replies of two attempts never mix."""
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        seen = b""
        while seen.count(b"ECHO") < 2:
            seen += await reader.read(65536)
        writer.write(b"$3\r\nold\r\n$5\r\nxy" if num_connections == 1 else b"$1\r\na\r\n$1\r\nb\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bare = connect(RedisAccess(f"redis://127.0.0.1:{port}/0"), no_handshake)
    line = MultiplexedConnection(bare)
    assert await line.run(("ECHO", "a"), ("ECHO", "b")) == [b"a", b"b"]
    assert num_connections == 2
    await line.aclose()
    await bare.aclose()
    server.close()
    await server.wait_closed()


async def test_a_dead_connection_is_replaced_and_calls_sent_again(client: Redis, line: MultiplexedConnection) -> None:
    await line.run(("PING",))
    await client.client_kill_filter(_type="normal", skipme=True)
    assert await asyncio.gather(*(line.run(("ECHO", str(i))) for i in range(5))) == [[b"%d" % i] for i in range(5)]


async def test_without_redis_a_call_fails_and_with_it_the_next_one_works(
    line: MultiplexedConnection, redis: RedisProcess
) -> None:
    await line.run(("SET", "key", "value"))
    waiting = asyncio.create_task(line.run(("BLPOP", "nothing", "0")))
    await asyncio.sleep(0.01)
    redis.kill()
    with pytest.raises(ConnectionError):
        await waiting
    with pytest.raises(ConnectionError):
        await line.run(("GET", "key"))
    redis.start()
    assert await line.run(("GET", "key")) == [b"value"]


async def test_a_late_reply_goes_to_nobody(
    line: MultiplexedConnection, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    await line.run(("SET", "counter", "1"))
    monkeypatch.setattr("tba_buffer.storage.redis_client.SOCKET_TIMEOUT_S", 0.3)
    with silent(redis), pytest.raises(TimeoutError):
        await line.run(("INCR", "counter"))  # never repeated: it may still be running
    monkeypatch.undo()
    replies = await asyncio.gather(*(line.run(("ECHO", str(i)), ("GET", "counter")) for i in range(5)))
    assert replies == [[b"%d" % i, b"2"] for i in range(5)]


async def test_what_is_under_way_with_a_late_call_still_gets_its_reply(
    line: MultiplexedConnection, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    await line.run(("SET", "key", "value"))
    with silent(redis):
        patient = asyncio.create_task(line.run(("GET", "key")))
        await asyncio.sleep(0)
        monkeypatch.setattr("tba_buffer.storage.redis_client.SOCKET_TIMEOUT_S", 0.2)
        with pytest.raises(TimeoutError):
            await line.run(("GET", "key"))
        assert not patient.done()
    assert await patient == [b"value"]


async def test_closing_ends_what_waits(client: Redis) -> None:
    line = MultiplexedConnection(client)
    waiting = asyncio.create_task(line.run(("BLPOP", "nothing", "0")))
    await asyncio.sleep(0.05)
    await line.aclose()
    with pytest.raises(ConnectionError):
        await waiting
    with pytest.raises(ConnectionError, match="closed"):
        await line.run(("PING",))
    await line.aclose()


def run(redis: RedisProcess, check: Any) -> None:
    """As under uvloop, where a connection that it has closed is a lost one, and not a defect of the buffer."""

    async def work() -> None:
        client = connect(RedisAccess(redis.url), nothing_more)
        try:
            await check(client)
        finally:
            await client.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


async def closed_under_its_hands(client: Any) -> Any:
    """A pooled connection whose transport is gone, as after a reset that was not read yet."""
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
