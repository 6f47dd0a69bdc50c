"""One connection to Redis that many requests share: commands are written at once, replies come back in that order.

The pool of redis-py gives every command a connection of its own for as long as it takes, which costs the service's one
core more than the command itself. Scripts (scripts.py) are what every push, draw, ack and lease waits for, so they go
this way: about a third of the CPU (docs/adr/0007-one-line-to-redis.md). Everything else uses the pool.

As with the pool, a command is repeated once when its connection turns out to be dead, and never after a timeout: it
may still be running.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from tba_buffer.redis_link import SOCKET_TIMEOUT_S, BytesRedis

RETRY_PAUSE_S = 0.05
CLOSE_TIMEOUT_S = 5.0
Command = Sequence[bytes | str | int | float]
OnLink = Callable[[], Awaitable[None]]


class _Call:
    """Commands that were written together, and the replies so far."""

    __slots__ = ("num_replies", "replies", "result")

    def __init__(self, num_replies: int) -> None:
        self.num_replies = num_replies
        self.replies: list[Any] = []
        self.result: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def settle(self) -> None:
        """All replies are there."""
        if not self.result.done():
            self.result.set_result(self.replies)

    def fail(self, error: RedisError) -> None:
        """There will be no reply, or it is too late."""
        if not self.result.done():
            self.result.set_exception(error)

    def abandon(self) -> None:
        """Nobody waits for the result any more."""
        if not self.result.done():
            self.result.cancel()
        elif not self.result.cancelled():
            self.result.exception()  # seen: asyncio need not complain


class _Link:
    """One connection with the calls that wait for their replies on it, oldest first.

    A task of its own writes: a caller that gives up never leaves a command half written, and its reply is read in turn.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._calls: deque[_Call] = deque()
        self._unsent: list[bytes] = []
        self._has_unsent = asyncio.Event()
        self._takes_calls = True
        self._writing = asyncio.create_task(self._write(), name="redis-line-write")
        self.reading = asyncio.create_task(self._read(), name="redis-line")
        """Done once nothing more comes from this link: its calls are settled and it is disconnected."""

    @property
    def is_open(self) -> bool:
        return self._takes_calls and self._connection.is_connected

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        packed = [hiredis.pack_command(tuple(command)) for command in commands]  # pyright: ignore[reportArgumentType]
        if not self.is_open:
            raise ConnectionError("the connection was closed")
        call = _Call(len(commands))
        self._calls.append(call)  # nothing runs between these two: the order here is that on the connection
        self._unsent.extend(packed)
        self._has_unsent.set()
        timeout = asyncio.get_running_loop().call_later(SOCKET_TIMEOUT_S, self._expire, call)
        try:
            return await call.result
        finally:
            timeout.cancel()
            call.abandon()
            self._end_if_nobody_waits()

    async def close(self) -> None:
        """Disconnect; calls under way fail."""
        self._takes_calls = False
        await self._connection.disconnect(nowait=True)
        self.reading.cancel()  # the connection ends only once Redis takes what is written, and it may not
        await asyncio.wait([self.reading], timeout=CLOSE_TIMEOUT_S)

    def _expire(self, call: _Call) -> None:
        """No reply in time. Other calls under way may still get theirs; new ones take another connection."""
        self._takes_calls = False
        call.fail(TimeoutError(f"no reply for {SOCKET_TIMEOUT_S:g} s"))
        self._end_if_nobody_waits()

    def _end_if_nobody_waits(self) -> None:
        """Whoever leaves last closes a link that takes no new calls: the late replies may never come."""
        if not self._takes_calls and all(waiting.result.done() for waiting in self._calls):
            self.reading.cancel()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_unsent.wait()
                self._has_unsent.clear()
                if not self._connection.is_connected:  # writing would connect again
                    return
                packed, self._unsent = self._unsent, []
                await self._connection.send_packed_command(packed, check_health=False)
        except (RedisError, OSError):
            return  # disconnected; the reader finds that out and says so to the callers
        finally:
            self._takes_calls = False

    async def _read(self) -> None:
        reason = "the connection was closed"
        try:
            while self._takes_calls or self._calls:
                try:
                    reply = await self._connection.read_response(timeout=math.inf)
                except ResponseError as error:  # the reply to one command
                    reply = error
                call = self._calls[0]
                call.replies.append(reply)
                if len(call.replies) == call.num_replies:
                    self._calls.popleft()
                    call.settle()
        except (RedisError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._takes_calls = False
            self._writing.cancel()
            for call in self._calls:
                call.fail(ConnectionError(reason))
            self._calls.clear()
            await self._connection.disconnect(nowait=True)


class RedisLine:
    """Runs commands over one shared connection.

    Args:
        redis: the client whose pool says how to connect.
        on_link: awaited behind a new connection, before anything is written on it; what it raises, the callers get.
    """

    def __init__(self, redis: BytesRedis, on_link: OnLink | None = None) -> None:
        self._pool, self._on_link = redis.connection_pool, on_link
        self._linking: asyncio.Task[_Link] | None = None
        self._links: set[_Link] = set()
        """All that still read: the newest takes calls, older ones wait for late replies."""
        self._is_closed = False

    async def run(self, *commands: Command) -> list[Any]:
        """One reply per command, in order.

        Raises:
            ResponseError (of redis-py): the first error among the replies; the other commands were run all the same.
            ConnectionError, TimeoutError (of redis-py): there is no connection, or no reply.
        """
        try:
            replies = await (await self._link()).call(commands)
        except ConnectionError:
            await asyncio.sleep(RETRY_PAUSE_S)
            replies = await (await self._link()).call(commands)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    async def aclose(self) -> None:
        """Close the connection for good; calls under way fail."""
        self._is_closed = True
        linking, self._linking = self._linking, None
        if linking is not None:
            await asyncio.wait([linking])
        for link in list(self._links):
            await link.close()

    async def _link(self) -> _Link:
        """The open link, or a new one; whoever needs it meanwhile waits for the same attempt."""
        if self._is_closed:
            raise ConnectionError("this side has closed its connections")
        linking = self._linking
        if linking is None or (linking.done() and (linking.exception() is not None or not linking.result().is_open)):
            linking = self._linking = asyncio.create_task(self._connect(), name="redis-line-connect")
        return linking.result() if linking.done() else await asyncio.shield(linking)

    async def _connect(self) -> _Link:
        connection = self._pool.make_connection()
        await connection.connect()
        if self._on_link is not None:
            try:
                await self._on_link()
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
        connection.socket_timeout = None  # the timeout is that of the whole call
        link = _Link(connection)
        self._links.add(link)
        link.reading.add_done_callback(lambda _: self._links.discard(link))
        return link


class RedisLines:
    """A few lines, each call on the one with the fewest calls under way.

    Under `appendfsync always` Redis answers what it read from all connections after one fsync; of one connection it
    reads little more than one push at a time. So pushes that come at once share an fsync only on different lines (at
    20 ms per fsync, 8 clients, batches of 64: 2,400 rollouts/s over one line). And a draw need not wait for
    the bytes of a push.

    Args:
        redis: the client whose pool says how to connect.
        num_lines: how many.
        on_link: as of `RedisLine`.
    """

    def __init__(self, redis: BytesRedis, num_lines: int, on_link: OnLink | None = None) -> None:
        self._lines = [RedisLine(redis, on_link) for _ in range(num_lines)]
        self._num_calls = [0] * num_lines

    async def run(self, *commands: Command) -> list[Any]:
        """As `RedisLine.run`."""
        at = self._num_calls.index(min(self._num_calls))
        self._num_calls[at] += 1
        try:
            return await self._lines[at].run(*commands)
        finally:
            self._num_calls[at] -= 1

    async def aclose(self) -> None:
        """Close the connections."""
        for line in self._lines:
            await line.aclose()
