"""Check that Redis keeps what it acknowledges, before this service acknowledges anything.

broken    Redis could lose what it acknowledges, or takes no writes: nothing is written, the service is not ready.
full      maxmemory is nearly reached: no rollouts are added. Draws, acks and leases use the memory that is left.

Redis is checked at start, every second, and after every new connection, before a write over that connection is
acknowledged. A new connection may lead to a Redis that was restarted with other settings, without its data
(`on_checked` finds that), or with a damaged file (`on_restarted` reads the log again).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError

from tba.config.redis import RedisAccess
from tba.errors import ConfigError, UnavailableError
from tba.logs import get_logger
from tba_buffer.storage.redis_client import (
    BytesRedis,
    MultiplexedPool,
    connect,
    may_be_late,
    redis_errors,
    refused_writes,
    why_unreachable,
)

log = get_logger("redis")
NUM_CONNECTIONS = 8
START_TIMEOUT_S = 300.0
"""How long a start waits for Redis to answer and load its file. Kubernetes waits twice as long for the buffer."""
FULL_SHARE = 0.95
"""Redis counts as full at this share of maxmemory. The rest is for draws, acks, leases and publications (small)."""
FIRST_REWRITE = "Redis has just turned its append-only file on and is still writing it for the first time"
READING_AGAIN = "Redis was started again, and its log is being read again"
PROBE = "tba:no-such-key"


class DurabilityCheck:
    """Checks one Redis, and owns the connections to it.

    Args:
        access: the address and password of Redis.
        is_view: the buffer is read-only, so only the `run_id` of Redis is read; CONFIG may be forbidden.

    Raises:
        ConfigError: the URL is no URL of Redis.
    """

    def __init__(self, access: RedisAccess, is_view: bool = False) -> None:
        self._url = access.shown
        self._is_view = is_view
        self._num_connections = 0
        self._num_connections_checked = -1
        self._rewrite_must_end = False
        self._checking = asyncio.Lock()
        self.redis: BytesRedis = connect(access, self._on_connect)
        # a write to a Redis that has lost data would take the place of what was acknowledged: hence the check first
        self.pool = MultiplexedPool(self.redis, NUM_CONNECTIONS, on_connected=self.require)
        self._process: str | None = None
        self._process_known: str | None = None
        self._process_damaged: tuple[str | None, str] | None = None
        self.on_checked: Callable[[], Awaitable[str | None]] | None = None
        """Awaited at each check; returns a sentence about acknowledged changes that Redis has lost, or None."""
        self.on_restarted: Callable[[], Awaitable[str | None]] | None = None
        """Awaited when Redis has been restarted; returns a sentence about what is wrong with its data, or None."""
        self.broken: str | None = None
        """Why nothing may be written."""
        self.full: str | None = None
        """Why no rollouts may be added."""
        self.late: str | None = None
        """Why the start waits for Redis."""

    @property
    def problem(self) -> str | None:
        """Why pushes are refused, or None."""
        return self.broken or self.full

    async def aclose(self) -> None:
        """Close the connections."""
        await self.pool.aclose()
        await self.redis.aclose()

    async def check(self) -> None:
        """Ask Redis for its settings and state, and update `broken` and `full`.

        Raises:
            UnavailableError: Redis cannot be asked.
        """
        async with self._checking:
            await self._check()

    async def _check(self) -> None:
        num_connections = self._num_connections
        with redis_errors("be asked for its settings"):
            broken, self.full = await self._ask()
        if broken is None and self.on_checked is not None:
            broken = await self.on_checked()
        if broken is None and self._process != self._process_known:
            # for this reason `require` does not wait for the lock: the reading may need a new connection, which asks it
            self.broken = READING_AGAIN
            # damage does not change while that Redis lives, so it is found out once
            process, broken = self._process, self.damaged
            if broken is None and self._process_known is not None and self.on_restarted is not None:
                broken = await self.on_restarted()
                if broken is not None:
                    self._process_damaged = process, broken
            if broken is None:
                self._process_known = process
        self.broken = broken
        self._num_connections_checked = num_connections

    @property
    def damaged(self) -> str | None:
        """The sentence of `on_restarted` about damaged data, if it is about the Redis process that runs now."""
        if self._process_damaged is None or self._process_damaged[0] != self._process:
            return None
        return self._process_damaged[1]

    def accept_damage(self) -> None:
        """Accept the data of the running Redis process as it is; `on_restarted` is not awaited for it again."""
        self._process_damaged, self._process_known = None, self._process

    async def require(self) -> None:
        """Raise unless Redis is durable; after a new connection, check Redis first.

        Raises:
            UnavailableError: Redis may lose acknowledged changes, or takes no writes.
        """
        if self._num_connections != self._num_connections_checked and self.broken != READING_AGAIN:
            async with self._checking:
                if self._num_connections != self._num_connections_checked:
                    await self._check()
        if self.broken is not None:
            raise UnavailableError(f"nothing is acknowledged now: {self.broken}")

    async def check_at_start(self, on_late: Callable[[], Awaitable[object]] | None = None) -> None:
        """Wait until Redis answers and has loaded, or first written, its file (wait `redis-start`); then check it.

        Args:
            on_late: awaited once, when the wait begins.

        Raises:
            ConfigError: Redis was not ready within START_TIMEOUT_S, cannot be used, or could lose acknowledged data.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.broken, self.full = await self._ask()
                if self.broken != FIRST_REWRITE:
                    break
                reason = self.broken
            except BusyLoadingError:
                reason = "it is loading its file"
            except AuthenticationError as error:
                raise ConfigError(
                    f"Redis at {self._url} refuses the password ({error}); correct buffer.redis_password_file, or the "
                    "password in buffer.redis_url"
                ) from None
            except RedisError as error:
                reason = f"it cannot be reached ({why_unreachable(error)}); start it, or correct buffer.redis_url"
                if not may_be_late(error):
                    raise ConfigError(f"Redis at {self._url}: {reason}") from None
            if time.monotonic() > deadline_s:
                raise ConfigError(f"Redis at {self._url} is not ready after {START_TIMEOUT_S:.0f} s: {reason}")
            if self.late is None:
                log.warning("waits", wait="redis-start", deadline_s=START_TIMEOUT_S, reason=reason)
                if on_late is not None:
                    await on_late()
            self.late = f"starting: Redis at {self._url}: {reason}"
            await asyncio.sleep(0.2)
        if self.broken is not None:
            raise ConfigError(self.broken)

    async def _on_connect(self, connection: Any) -> None:
        await connection.on_connect()
        self._num_connections += 1

    async def _ask(self) -> tuple[str | None, str | None]:
        redis = self.redis
        if self._is_view:
            self._process = str((await redis.info("server"))["run_id"])
            return None, None
        try:
            config: dict[str, Any] = {}
            # one pattern per call: before Redis 7, CONFIG GET takes no more
            for names in ("*append*", "maxmemory*", "aof-load-truncated"):
                config |= await redis.config_get(names)
        except BusyLoadingError:
            raise
        except ResponseError as error:
            return f"Redis does not allow CONFIG GET ({error}), so it is unknown whether it keeps what it accepts", None
        info = await redis.info()
        self._process = str(info["run_id"])
        problem = self._config_problem(config) or await self._state_problem(info)
        if problem is None:
            try:
                await redis.unlink(PROBE)  # a write that changes nothing
            except RedisError as error:
                if (problem := refused_writes(error)) is None:
                    raise
        limit = int(config.get("maxmemory", 0))
        used = int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))
        if not limit or used < FULL_SHARE * limit:
            return problem, None
        return problem, (
            f"Redis is full: it uses {used / 2**20:,.1f} MiB of its maxmemory {limit / 2**20:,.1f} MiB (OOM); raise "
            "maxmemory, or lower buffer.max_bytes or buffer.max_rollouts and restart the buffer"
        )

    def _config_problem(self, config: Mapping[str, str]) -> str | None:
        wanted = {
            "appendonly": "yes",
            "appendfsync": "always",
            "no-appendfsync-on-rewrite": "no",
            "aof-load-truncated": "no",
        }
        for name, value in wanted.items():
            if config.get(name) != value:
                self._rewrite_must_end |= name == "appendonly"
                return (
                    f"Redis has {name} {config.get(name)}, so it could lose rollouts it has acknowledged; "
                    f"set `{name} {value}` in redis.conf (or redis-server --{name} {value})"
                )
        if int(config.get("maxmemory", 0)) and config.get("maxmemory-policy") != "noeviction":
            return (
                f"Redis has maxmemory-policy {config.get('maxmemory-policy')}, so it could drop any key when it is "
                "full; set `maxmemory-policy noeviction`"
            )
        return None

    async def _state_problem(self, info: Mapping[str, Any]) -> str | None:
        if info.get("redis_mode") == "cluster":
            return "Redis runs in cluster mode, which splits the keys of a run; use one without (cluster-enabled no)"
        if info["role"] != "master":
            return (
                f"Redis is a replica of {info.get('master_host')}:{info.get('master_port')}, which overwrites it; "
                "point buffer.redis_url at the primary"
            )
        if info["aof_last_write_status"] != "ok":
            return "Redis could not write its append-only file (aof_last_write_status); free space on its disk"
        # an append-only file that was turned on at run time protects nothing until its first rewrite has ended
        is_rewriting = bool(info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])
        if is_rewriting and self._num_connections_checked < 0 and not await self._has_file(info):
            self._rewrite_must_end = True
        # the first rewrite must also succeed; a later one may fail, since Redis continues with the old file
        self._rewrite_must_end &= is_rewriting or info["aof_last_bgrewrite_status"] != "ok"
        if self._rewrite_must_end:
            return FIRST_REWRITE
        return None

    async def _has_file(self, info: Mapping[str, Any]) -> bool:
        """Return whether a complete append-only file exists already, which the running rewrite only replaces.

        A new file has no base until its first rewrite has ended; Redis begins that rewrite by itself at 64 MB.
        """
        if info["aof_base_size"] or int(str(info["redis_version"]).split(".")[0]) >= 7:
            return bool(info["aof_base_size"])
        # Redis 6: only a file that is in use grows. In Redis 7 a file that was just turned on grows too, so that there
        # a start waits until the rewrite has ended.
        try:
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.set(PROBE, b"")
                pipe.unlink(PROBE)
                await pipe.execute()
        except RedisError as error:
            if refused_writes(error) is None:
                raise
            return False
        return (await self.redis.info("persistence"))["aof_current_size"] > info["aof_current_size"]
