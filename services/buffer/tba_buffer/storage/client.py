"""Connect to Redis, and turn its errors into those of this service.

The client repeats a command once when a connection turns out to be dead, so every script is safe to run twice. The HTTP
clients do all further retries. A command that timed out is never repeated here, since it may still be running.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, TimeoutError

from tba.config.redis import RedisAccess
from tba.errors import ConfigError, UnavailableError

SOCKET_TIMEOUT_S = 15.0
MAX_CONNECTIONS = 64
"""Further commands wait for one of these connections. More would not help: Redis runs one command at a time."""
WRITE_REFUSALS = {
    "OOM": "Redis is full (OOM: maxmemory is reached); raise maxmemory, or lower buffer.max_bytes and start again",
    "READONLY": "Redis is a read-only replica (READONLY); point buffer.redis_url at the primary",
    "MISCONF": "Redis cannot write to its disk (MISCONF); free space there, its log says more",
    "NOREPLICAS": "Redis has fewer replicas than its min-replicas-to-write asks for (NOREPLICAS)",
    "LOADING": "Redis is still loading its file (LOADING)",
}
"""Error code of Redis -> the state that it is in."""

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


class _ReconnectingConnection(Connection):
    """A connection whose loss is always a ConnectionError, which redis-py answers with a second try."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().send_packed_command(*args, **kwargs)
        except RuntimeError as error:  # uvloop says so of a transport that it has closed; redis-py would not try again
            raise ConnectionError(f"the connection is closed ({error})") from error


class _ReconnectingTlsConnection(_ReconnectingConnection, SSLConnection):
    """The same over TLS."""


_CONNECTIONS: dict[type, type] = {Connection: _ReconnectingConnection, SSLConnection: _ReconnectingTlsConnection}


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
    """Return the state in which Redis takes no writes, if the error is about one."""
    # inside the error of a script the code is somewhere in the text
    code = re.search(rf"\b({'|'.join(WRITE_REFUSALS)})\b", f"{getattr(error, 'status_code', '')} {error}")
    return WRITE_REFUSALS[code[1]] if code is not None else None


def why_unreachable(error: RedisError) -> str:
    """Return the reason in a few words. TLS has many reasons, so its own is named."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}; tls.ca_file must hold its authority"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS there: {cause.reason or cause}"
    return type(error).__name__


@contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Raise UnavailableError for every error of Redis while it does `what`, so that nothing is acknowledged.

    Raises:
        UnavailableError: Redis is away, loading, full, read-only, or cannot write its file.
    """
    try:
        yield
    except RedisError as error:
        state = refused_writes(error)
        if state is None and isinstance(error, ConnectionError | TimeoutError):
            state = f"Redis does not answer ({type(error).__name__}: {error})"
        state = state or f"{type(error).__name__}: {error}"
        raise UnavailableError(f"Redis could not {what}: {state}; nothing was acknowledged, try again") from None
