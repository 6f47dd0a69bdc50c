"""The connection to Redis, and its errors as ours.

The client repeats a command once when a connection turns out to be dead, so every script is safe to run twice; all
further retries are the HTTP clients'. A timeout is never repeated here: the command may still be running.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from tba.errors import ConfigError, UnavailableError

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


def connect(redis_url: str, on_connect: Callable[[Any], Awaitable[None]]) -> BytesRedis:
    """A client that answers bytes.

    Args:
        redis_url: where.
        on_connect: is given every new connection; it must await `connection.on_connect()`.

    Raises:
        ConfigError: the URL is not one of Redis.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            redis_url,
            max_connections=MAX_CONNECTIONS,
            timeout=SOCKET_TIMEOUT_S,
            retry=Retry(ConstantBackoff(0.05), 1, supported_errors=(ConnectionError,)),
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            redis_connect_func=on_connect,
        )
    except ValueError as error:
        raise ConfigError(f"buffer.redis_url {redis_url!r} is not a Redis URL: {error}") from None
    return Redis.from_pool(pool)


def refused_writes(error: RedisError) -> str | None:
    """The state in which Redis takes no writes, if that is what the error says."""
    code = re.search(rf"\b({'|'.join(REFUSALS)})\b", f"{getattr(error, 'status_code', '')} {error}")
    return REFUSALS[code[1]] if code is not None else None


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
