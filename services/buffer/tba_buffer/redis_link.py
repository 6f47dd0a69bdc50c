"""The connection to Redis: what it must promise before this service acknowledges anything, and its errors as ours.

The client repeats a command once when a connection turns out to be dead, so every script is safe to run twice; all
further retries are the HTTP clients'. A timeout is never repeated here: the command may still be running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, ResponseError

from tba.errors import ConfigError, UnavailableError

SOCKET_TIMEOUT_S = 15.0
LOADING_TIMEOUT_S = 300.0
REQUIRED = {"appendonly": "yes", "appendfsync": "always"}


BytesRedis = Any
"""A redis.asyncio.Redis whose replies are bytes: redis-py annotates each as bytes or str, whatever the client."""


def connect(redis_url: str) -> BytesRedis:
    """A client that answers bytes.

    Raises:
        ConfigError: the URL is not one of Redis.
    """
    retry = Retry(ConstantBackoff(0.05), 1, supported_errors=(ConnectionError,))
    try:
        return Redis.from_url(
            redis_url, retry=retry, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=5.0, max_connections=256
        )
    except ValueError as error:
        raise ConfigError(f"buffer.redis_url {redis_url!r} is not a Redis URL: {error}") from None


@contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Whatever keeps Redis from doing `what` becomes UnavailableError: the caller acknowledges nothing.

    Raises:
        UnavailableError: Redis is gone, loading, full, read-only, or cannot write its file.
    """
    try:
        yield
    except RedisError as error:
        raise UnavailableError(
            f"Redis could not {what} ({type(error).__name__}: {error}); nothing was acknowledged, try again"
        ) from None


async def promise_problem(redis: BytesRedis) -> str | None:
    """Why this Redis could lose what it acknowledges, or None.

    Raises:
        RedisError: Redis cannot be asked.
    """
    try:
        config: dict[str, Any] = {**await redis.config_get("append*"), **await redis.config_get("maxmemory*")}
    except ResponseError as error:
        if isinstance(error, BusyLoadingError):
            raise
        return f"Redis does not let CONFIG GET be called ({error}), so nobody knows whether it keeps what it accepts"
    for name, wanted in REQUIRED.items():
        if config.get(name) != wanted:
            return (
                f"Redis has {name} {config.get(name)}, so it could lose rollouts it has acknowledged; "
                f"set `{name} {wanted}` in redis.conf (or redis-server --{name} {wanted})"
            )
    if int(config.get("maxmemory", 0)) and config.get("maxmemory-policy") != "noeviction":
        return (
            f"Redis has maxmemory-policy {config.get('maxmemory-policy')}, so it could drop any key when it is full; "
            "set `maxmemory-policy noeviction`"
        )
    return None


async def check_at_start(redis: BytesRedis, redis_url: str) -> None:
    """Wait while Redis loads its file, then check its promise.

    Raises:
        ConfigError: Redis cannot be reached, or could lose acknowledged data.
    """
    deadline = time.monotonic() + LOADING_TIMEOUT_S
    while True:
        try:
            await redis.ping()
            problem = await promise_problem(redis)
        except BusyLoadingError:
            if time.monotonic() > deadline:
                raise ConfigError(f"Redis at {redis_url} is still loading after {LOADING_TIMEOUT_S:.0f} s") from None
            await asyncio.sleep(0.2)
            continue
        except RedisError as error:
            raise ConfigError(
                f"Redis at {redis_url} cannot be reached ({type(error).__name__}); start it, or correct "
                "buffer.redis_url"
            ) from None
        if problem is not None:
            raise ConfigError(problem)
        return
