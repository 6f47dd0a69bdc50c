"""Connect to Redis, and turn its errors into those of this service.

    connect          a client of redis-py: its pool lends every command a connection of its own until the reply
    MultiplexedPool  a few connections that many requests share: commands are written at once, replies return in the
                     same order

The pool of redis-py costs the service's one core more than the command itself. Every push, draw, ack and lease waits
for a script (context.py), so scripts are run over shared connections, for about a third of the CPU
(docs/adr/0007-shared-redis-connections.md). All else uses the pool.

Both repeat a command once when a connection turns out to be dead, so every script is safe to run twice. The HTTP
clients do all further retries. A command that timed out is never repeated here, since it may still be running.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hiredis
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from tba.config.redis import RedisAccess
from tba.errors import ConfigError, UnavailableError

SOCKET_TIMEOUT_S = 15.0
RETRY_PAUSE_S = 0.05
CLOSE_TIMEOUT_S = 5.0
MAX_COUNT = 2**53
MAX_CONNECTIONS = 64
"""Most connections of the pool; further commands wait. More would not help: Redis runs one command at a time."""
WRITE_REFUSALS = {
    "OOM": "Redis is full (OOM: maxmemory is reached); raise maxmemory, or lower buffer.max_bytes and start again",
    "READONLY": "Redis is a read-only replica (READONLY); point buffer.redis_url at the primary",
    "MISCONF": "Redis cannot write to its disk (MISCONF); free space there, its log says more",
    "NOREPLICAS": "Redis has fewer replicas than its min-replicas-to-write asks for (NOREPLICAS)",
    "LOADING": "Redis is still loading its file (LOADING)",
}
"""Error code of Redis -> the sentence that says why Redis takes no writes."""

Command = Sequence[bytes | str | int | float]
OnConnected = Callable[[], Awaitable[None]]
BytesRedis = Any
"""A redis.asyncio.Redis whose replies are bytes. redis-py annotates every reply as bytes or str, hence Any."""


class _PasswordFile(CredentialProvider):
    """Read the password file for every new connection, so that a changed password needs no restart."""

    def __init__(self, access: RedisAccess) -> None:
        self._access = access

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            return self._access.credentials()
        except ConfigError as error:
            raise AuthenticationError(str(error)) from None

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class _Reconnecting(AbstractConnection):
    """A connection whose loss is always a ConnectionError, which redis-py answers with a second try."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().send_packed_command(*args, **kwargs)
        except RuntimeError as error:  # uvloop says so of a transport that it has closed; redis-py would not try again
            raise ConnectionError(f"the connection is closed ({error})") from error


_KINDS = (Connection, SSLConnection, UnixDomainSocketConnection)
_CONNECTIONS: dict[Any, Any] = {
    kind: type(f"_Reconnecting{kind.__name__}", (_Reconnecting, kind), {}) for kind in _KINDS
}


def connect(access: RedisAccess, on_connect: Callable[[Any], Awaitable[None]]) -> BytesRedis:
    """Return a client whose replies are bytes.

    Args:
        access: address and password.
        on_connect: called with every new connection; it must await `connection.on_connect()`.

    Raises:
        ConfigError: the URL is no URL of Redis.
    """
    secret = {} if access.password_file is None else {"credential_provider": _PasswordFile(access)}
    try:
        pool = BlockingConnectionPool.from_url(
            access.url,
            **secret,
            **access.tls,
            max_connections=MAX_CONNECTIONS,
            timeout=SOCKET_TIMEOUT_S,
            retry=Retry(ConstantBackoff(0.05), 1, supported_errors=(ConnectionError,)),
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            redis_connect_func=on_connect,
        )
    except ValueError as error:
        raise ConfigError(f"buffer.redis_url {access.shown!r} is not a Redis URL: {error}") from None
    pool.connection_class = _CONNECTIONS.get(pool.connection_class, pool.connection_class)  # from_url has chosen
    return Redis.from_pool(pool)


def refused_writes(error: RedisError) -> str | None:
    """Return the sentence of WRITE_REFUSALS for an error; None if Redis did not refuse a write."""
    # inside the error of a script the code is somewhere in the text
    code = re.search(rf"\b({'|'.join(WRITE_REFUSALS)})\b", f"{getattr(error, 'status_code', '')} {error}")
    return WRITE_REFUSALS[code[1]] if code is not None else None


def may_be_late(error: RedisError) -> bool:
    """Return whether waiting may help: Redis or its DNS name may appear later. False for refusals and TLS errors."""
    is_away = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, AuthorizationError)
    return is_away and not isinstance(error.__cause__ or error.__context__, ssl.SSLError)


def why_unreachable(error: RedisError) -> str:
    """Return in a few words why Redis cannot be reached; for TLS, the reason of the TLS library."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}; tls.ca_file must hold its authority"
    if isinstance(cause, ssl.SSLError):
        return f"the server does not speak TLS: {cause.reason or cause}"
    return type(error).__name__


@contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Turn every Redis error in the caller's `with` block into UnavailableError: "Redis could not <what>: ...".

    Raises:
        UnavailableError: Redis is away, loading, full, read-only, cannot write its file, or gave another error.
    """
    try:
        yield
    except RedisError as error:
        state = refused_writes(error)
        if state is None and isinstance(error, ConnectionError | TimeoutError):
            state = f"Redis does not answer ({type(error).__name__}: {error})"
        state = state or f"{type(error).__name__}: {error}"
        raise UnavailableError(f"Redis could not {what}: {state}; nothing was acknowledged, try again") from None


def read_count(value: bytes | None) -> int | None:
    """Parse a count stored in Redis; return 0 if it is absent, None if it is damaged."""
    try:
        number = int(value or 0)
    except ValueError:
        return None
    return number if 0 <= number <= MAX_COUNT else None


class _Call:
    """Commands that were written together, and their replies so far."""

    __slots__ = ("num_replies", "replies", "result")

    def __init__(self, num_replies: int) -> None:
        self.num_replies = num_replies
        self.replies: list[Any] = []
        self.result: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def fail(self, error: RedisError) -> None:
        """Raise `error` in the caller, unless the call has ended already."""
        if not self.result.done():
            self.result.set_exception(error)


class _Socket:
    """One physical connection, and the calls that wait for replies on it, oldest first.

    A task of its own writes, so that a caller that gives up never leaves a command half written.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._calls: deque[_Call] = deque()
        self._unsent: list[bytes] = []
        self._has_unsent = asyncio.Event()
        self._takes_calls = True
        self._writing = asyncio.create_task(self._write(), name="redis-multiplexed-write")
        self.reading = asyncio.create_task(self._read(), name="redis-multiplexed")
        """Done once nothing more comes from this socket: its calls are settled and it is disconnected."""

    @property
    def is_open(self) -> bool:
        return self._takes_calls and self._connection.is_connected

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        packed = [hiredis.pack_command(tuple(command)) for command in commands]  # pyright: ignore[reportArgumentType]
        if not self.is_open:
            raise ConnectionError("the connection was closed")
        call = _Call(len(commands))
        # no await between these two: the order of the calls is the order on the connection
        self._calls.append(call)
        self._unsent.extend(packed)
        self._has_unsent.set()
        timeout = asyncio.get_running_loop().call_later(SOCKET_TIMEOUT_S, self._expire, call)
        try:
            return await call.result
        finally:
            timeout.cancel()
            # nobody waits for the result any more
            if not call.result.done():
                call.result.cancel()
            elif not call.result.cancelled():
                call.result.exception()  # asyncio complains of an exception that nobody has looked at
            self._end_if_nobody_waits()

    async def close(self) -> None:
        """Disconnect; calls under way fail."""
        self._takes_calls = False
        await self._connection.disconnect(nowait=True)
        # asyncio closes a connection only once all is written, and Redis may not take it: so do not wait for its end
        self.reading.cancel()
        await asyncio.wait([self.reading], timeout=CLOSE_TIMEOUT_S)

    def _expire(self, call: _Call) -> None:
        """Fail a call whose reply is late, and take no new calls. Other calls under way may still get their replies."""
        self._takes_calls = False
        call.fail(TimeoutError(f"no reply for {SOCKET_TIMEOUT_S:g} s"))
        self._end_if_nobody_waits()

    def _end_if_nobody_waits(self) -> None:
        """Close the socket if it takes no new calls and no caller waits: the missing replies may never come."""
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
            return  # disconnected: the reader finds that out too, and tells the callers
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
                # replies come in the order of the commands, so this one belongs to the oldest call
                call = self._calls[0]
                call.replies.append(reply)
                if len(call.replies) == call.num_replies:
                    self._calls.popleft()
                    if not call.result.done():
                        call.result.set_result(call.replies)
        except (RedisError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._takes_calls = False
            self._writing.cancel()
            for call in self._calls:
                call.fail(ConnectionError(reason))
            self._calls.clear()
            await self._connection.disconnect(nowait=True)


class MultiplexedConnection:
    """Runs commands over one shared connection.

    Args:
        redis: the client whose pool makes the connections.
        on_connected: awaited after connecting, before anything is written. Its errors reach the callers.
    """

    def __init__(self, redis: BytesRedis, on_connected: OnConnected | None = None) -> None:
        self._pool, self._on_connected = redis.connection_pool, on_connected
        self._connecting: asyncio.Task[_Socket] | None = None
        self._sockets: set[_Socket] = set()
        """The newest one takes calls; older ones wait for late replies."""
        self._is_closed = False

    async def run(self, *commands: Command) -> list[Any]:
        """Run commands, and return one reply per command, in order.

        Raises:
            ResponseError (of redis-py): the first error among the replies; the other commands were run all the same.
            ConnectionError, TimeoutError (of redis-py): there is no connection, or no reply.
        """
        try:
            replies = await (await self._socket()).call(commands)
        except ConnectionError:
            # once: the connection was dead, and a script may run twice
            await asyncio.sleep(RETRY_PAUSE_S)
            replies = await (await self._socket()).call(commands)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    async def aclose(self) -> None:
        """Close the connection for good; calls under way fail."""
        self._is_closed = True
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            await asyncio.wait([connecting])
        for socket in list(self._sockets):
            await socket.close()

    async def _socket(self) -> _Socket:
        """Return the open socket, or connect a new one. Concurrent callers share one attempt to connect."""
        if self._is_closed:
            raise ConnectionError("this side has closed its connections")
        connecting = self._connecting
        if connecting is None or (
            connecting.done() and (connecting.exception() is not None or not connecting.result().is_open)
        ):
            connecting = self._connecting = asyncio.create_task(self._connect(), name="redis-multiplexed-connect")
        return connecting.result() if connecting.done() else await asyncio.shield(connecting)

    async def _connect(self) -> _Socket:
        connection = self._pool.make_connection()
        await connection.connect()
        if self._on_connected is not None:
            try:
                await self._on_connected()
            # also when cancelled: nobody else knows this connection
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
        connection.socket_timeout = None  # each call has a timeout for all of its replies
        socket = _Socket(connection)
        self._sockets.add(socket)
        socket.reading.add_done_callback(lambda _: self._sockets.discard(socket))
        return socket


class MultiplexedPool:
    """A few multiplexed connections. Each call takes the one with the fewest calls under way.

    Under `appendfsync always` Redis reads commands from all connections, does one fsync, and then answers them all.
    From one connection it reads little more than one push at a time. So simultaneous pushes share an fsync only on
    different connections (20 ms per fsync, 8 clients, batches of 64: 2,400 rollouts/s over one connection). A draw on
    another connection also does not wait for the bytes of a push.

    Args:
        redis: the client whose pool makes the connections.
        num_connections: how many connections to share.
        on_connected: as for `MultiplexedConnection`.
    """

    def __init__(self, redis: BytesRedis, num_connections: int, on_connected: OnConnected | None = None) -> None:
        self._connections = [MultiplexedConnection(redis, on_connected) for _ in range(num_connections)]
        self._num_calls = [0] * num_connections

    async def run(self, *commands: Command) -> list[Any]:
        """Run commands as `MultiplexedConnection.run` does."""
        # the least busy one: a small call need not wait behind the bytes of a large push
        at = self._num_calls.index(min(self._num_calls))
        self._num_calls[at] += 1
        try:
            return await self._connections[at].run(*commands)
        finally:
            self._num_calls[at] -= 1

    async def aclose(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            await connection.aclose()
