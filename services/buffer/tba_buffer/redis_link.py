"""The connection to Redis, and its errors as ours.

The client repeats a command once when a connection turns out to be dead, so every script is safe to run twice; all
further retries are the HTTP clients'. A timeout is never repeated here: the command may still be running.
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

from tba.errors import ConfigError, UnavailableError
from tba.redis_access import RedisAccess

SOCKET_TIMEOUT_S = 15.0
MAX_CONNECTIONS = 64
"""More commands at once than this wait for one of these: Redis works on one at a time."""
REFUSALS = {
    "OOM": "Redis is full (OOM: maxmemory is reached); raise maxmemory, or lower buffer.max_bytes and start again",
    "READONLY": "Redis is a read-only replica (READONLY); point buffer.redis_url at the primary",
    "MISCONF": "Redis cannot write to its disk (MISCONF); free space there, its log says more",
    "NOREPLICAS": "Redis has fewer replicas than its min-replicas-to-write asks for (NOREPLICAS)",
    "LOADING": "Redis is still loading its file (LOADING)",
}
"""Error code in the reply of Redis -> the state it is in. Inside a script the code is somewhere in the text."""

BytesRedis = Any
"""A redis.asyncio.Redis whose replies are bytes: redis-py annotates each as bytes or str, whatever the client."""


class _PasswordFile(CredentialProvider):
    """The password of a file, read for every new connection."""

    def __init__(self, access: RedisAccess) -> None:
        self._access = access

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            return self._access.credentials()
        except ConfigError as error:
            raise AuthenticationError(str(error)) from None

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class _GoneIsGone(Connection):
    """A connection that was lost is a ConnectionError, also where uvloop finds its own end of it closed already: it
    says so with a RuntimeError, which redis-py would pass on as if it were a defect, without the second try."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().send_packed_command(*args, **kwargs)
        except RuntimeError as error:
            raise ConnectionError(f"the connection is closed ({error})") from error


class _TlsGoneIsGone(_GoneIsGone, SSLConnection):
    """The same over TLS."""


_CONNECTIONS: dict[type, type] = {Connection: _GoneIsGone, SSLConnection: _TlsGoneIsGone}


def connect(access: RedisAccess, on_connect: Callable[[Any], Awaitable[None]]) -> BytesRedis:
    """A client that answers bytes.

    Args:
        access: where, and with which password.
        on_connect: is given every new connection; it must await `connection.on_connect()`.

    Raises:
        ConfigError: the URL is not one of Redis.
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
    """The state in which Redis takes no writes, if that is what the error says."""
    code = re.search(rf"\b({'|'.join(REFUSALS)})\b", f"{getattr(error, 'status_code', '')} {error}")
    return REFUSALS[code[1]] if code is not None else None


def why_unreachable(error: RedisError) -> str:
    """In a few words; of TLS, which has many reasons, the one."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}; tls.ca_file must hold its authority"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS there: {cause.reason or cause}"
    return type(error).__name__


@contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Whatever keeps Redis from doing `what` becomes UnavailableError: the caller acknowledges nothing.

    Raises:
        UnavailableError: Redis is gone, loading, full, read-only, or cannot write its file.
    """
    try:
        yield
    except RedisError as error:
        state = refused_writes(error)
        if state is None and isinstance(error, ConnectionError | TimeoutError):
            state = f"Redis does not answer ({type(error).__name__}: {error})"
        state = state or f"{type(error).__name__}: {error}"
        raise UnavailableError(f"Redis could not {what}: {state}; nothing was acknowledged, try again") from None
