"""Check Redis: whether it answers, keeps what it acknowledges, and has room for what the buffer may store.

Only the buffer talks to Redis. From another machine, where a NetworkPolicy may stand between, the buffer is asked
what it thinks of its Redis.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tba.config import Recipe
from tba.config.redis import redis_access
from tba.errors import ConfigError
from tba.tls import explain_missing_tls, explain_tls_error
from tba_cli.doctor.target import Answer, CheckResult, Target, fail, ok, skip, warn
from tba_cli.redis_server import find_redis_server

T = TypeVar("T")
TIMEOUT_S = 5.0
"""Deadline of a connection, and of each answer."""
MAX_SHOWN_CHARS = 500
STRONG_ENOUGH = {"always": ("always",), "everysec": ("everysec", "always")}
MEMORY_FACTOR = 1.3
"""Redis needs this many times `buffer.max_bytes` (docs/operations.md, Redis)."""
OLDEST_VERSION = (6, 2)
GIB = 2**30


class RedisProblemError(Exception):
    """Redis does not answer, refuses, or cannot be asked from here; one sentence."""


class NotInstalledError(RedisProblemError):
    """The package `redis` is not installed here."""


def check_redis(target: Target) -> Iterator[CheckResult]:
    """Check how durable the buffer's Redis is, and how much room it has."""
    if target.is_local and not target.is_going:
        try:
            yield ok("redis", f"`tba run` starts {find_redis_server(target.recipe.local.redis_server)}")
        except ConfigError as error:
            yield fail("redis", str(error), "install one of those")
        return
    try:
        # one connection for both, so that they are about the same server
        info, config = ask_redis(target.recipe, _read_state)
    except RedisProblemError as error:
        yield from _ask_buffer(target, error)
        return
    where = redis_access(target.recipe).shown
    yield ok("redis", f"Redis {info.get('redis_version')} at {where}, role {info.get('role')}")
    yield from _state(info)
    if config is None:
        yield fail(
            "redis-config",
            "Redis does not allow CONFIG GET, so it is unknown whether it keeps what it accepts",
            "allow the user of buffer.redis_url CONFIG GET (ACL SETUSER ... +config|get); the buffer needs it too",
        )
        return
    yield from _durability(target.recipe, config)
    yield from _memory(target.recipe, info, config)
    yield from _tuning(config)


def ask_redis(recipe: Recipe, ask: Callable[[Any], T]) -> T:
    """Connect to the buffer's Redis, and return what `ask` reads with the client.

    Raises:
        RedisProblemError: Redis cannot be reached, refuses, or is none; or the settings cannot be used.
        NotInstalledError: there is no client library here.
    """
    if importlib.util.find_spec("redis") is None:
        raise NotInstalledError("the package redis is not installed here (pip install 'tba[doctor]')")
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.exceptions import AuthenticationError, ConnectionError, ResponseError, TimeoutError
    from redis.retry import Retry

    login: dict[str, str] = {}
    try:
        access = redis_access(recipe)
        if access.password_file is not None:
            *user, password = access.credentials()
            login = {"password": password, **({"username": user[0]} if user else {})}
        # RESP2 and no retries: the answer of the server as it is, and at once
        client = Redis.from_url(
            access.url,
            **access.tls,
            **login,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
            protocol=2,
        )
    except (ConfigError, ValueError) as error:
        raise RedisProblemError(str(error)) from None
    where, ca_file = f"Redis at {access.shown}", recipe.tls.ca_file
    secret = client.get_connection_kwargs().get("password")
    try:
        with client:
            client.ping()
            return ask(client)
    except (AuthenticationError, ResponseError) as error:
        problem = f"{where} answers: {_hidden(error, secret)}"
    except (ConnectionError, TimeoutError, OSError) as error:
        # the SSLError lies beneath the error of the library
        problem = explain_tls_error(error, where=where, ca_file=ca_file, plain="redis")
        if problem is None and (found := explain_missing_tls(access.shown, ca_file=ca_file)) is not None:
            problem = f"Redis at {found}"
        if problem is None:
            problem = f"{where} cannot be reached ({type(error).__name__}: {_hidden(error, secret)})"
            if access.url.startswith("rediss:") and isinstance(error, TimeoutError):
                problem += "; a server without TLS never answers a TLS client: should it be redis://?"
    except RedisProblemError:
        raise
    except Exception as error:  # the library has no class for an answer that is not of the protocol
        problem = f"{where}: this is not Redis ({type(error).__name__}: {_hidden(error, secret)})"
    raise RedisProblemError(problem) from None


def clock_offset_s(client: Any) -> tuple[float, float]:
    """Return how many seconds the clock of Redis is ahead of ours, and how uncertain that is.

    Raises:
        RedisProblemError: it did not answer with a time.
    """
    before_s = time.time()
    try:
        seconds, micros = client.time()
    except (TypeError, ValueError):
        raise RedisProblemError("Redis did not answer with its time") from None
    after_s = time.time()
    # half of the round trip is the uncertainty, as in NTP
    return seconds + micros / 1e6 - (before_s + after_s) / 2, (after_s - before_s) / 2


def _read_state(client: Any) -> tuple[dict[str, str], dict[str, str] | None]:
    """Return INFO, and the configuration, or None where CONFIG GET is not allowed."""
    from redis.exceptions import ResponseError

    info = {name: str(value) for name, value in client.info().items()}
    try:
        return info, client.config_get("*")
    except ResponseError:
        return info, None


def _hidden(error: Exception, secret: str | None) -> str:
    """Return the text of an error without the password: some servers answer with the words of the command."""
    text = str(error)
    return (text.replace(secret, "***") if secret else text)[:MAX_SHOWN_CHARS]


def _ask_buffer(target: Target, problem: RedisProblemError) -> Iterator[CheckResult]:
    answer = target.ask("buffer", "/metrics")
    if isinstance(answer, Answer) and answer.status == 200:
        # /metrics needs no token, and this check has none for /v1
        found = re.search(rb"^tba_redis_durable (\S+)", answer.body, re.MULTILINE)
        if found is None:
            yield fail(
                "redis",
                f"{target.url('buffer')} has no tba_redis_durable in its /metrics: no buffer service, or one of 0.2",
                "correct buffer.url, or run the doctor of the release that runs there",
            )
            return
        if found[1] in (b"1", b"1.0"):
            yield ok("redis", "not reached from here; the buffer says that Redis keeps what it acknowledges")
            return
        yield fail(
            "redis",
            "the buffer says that Redis is not durable now",
            "its /readyz says why; docs/operations.md, Redis, has a line for each state",
        )
    elif isinstance(problem, NotInstalledError):
        yield skip("redis", f"not asked, because {problem}, and the buffer service does not answer")
    elif "buffer" in target.services:
        yield fail("redis", str(problem), "start Redis, or correct buffer.redis_url and buffer.redis_password_file")
    else:
        yield skip("redis", f"not reachable from here, but nothing here needs it ({problem})")


def _state(info: Mapping[str, str]) -> Iterator[CheckResult]:
    # two numbers: a third one never decides
    version = tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", "0"))[:2])
    if version < OLDEST_VERSION:
        yield fail("redis-version", f"Redis is {info.get('redis_version')}", "use Redis 6.2 or newer, or Valkey")
    if info.get("redis_mode") == "cluster":
        remedy = "use one without (cluster-enabled no); a replica of it may stand by"
        yield fail("redis-cluster", "this Redis runs in cluster mode, which splits the keys of a run", remedy)
    if info.get("role") != "master":
        yield fail(
            "redis-role",
            f"this Redis is a replica of {info.get('master_host')}:{info.get('master_port')}",
            "point buffer.redis_url at the primary",
        )
    if info.get("loading") == "1":
        yield warn("redis-loading", "Redis is still loading its file", "wait; nothing is answered before that")
    if info.get("aof_last_write_status", "ok") != "ok":
        yield fail("redis-disk", "Redis could not write its append-only file", "free space on its disk")
    if info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield warn(
            "redis-rewrite",
            "the last rewrite of the append-only file failed; Redis continues with the old one, which grows",
            "give its disk and memory room for a second copy",
        )


def _durability(recipe: Recipe, config: Mapping[str, str]) -> Iterator[CheckResult]:
    wanted = {
        "appendonly": ("yes",),
        "appendfsync": STRONG_ENOUGH[recipe.buffer.appendfsync],
        "no-appendfsync-on-rewrite": ("no",),
        # with `yes` Redis starts with a torn file, and drops the end of it
        "aof-load-truncated": ("no",),
    }
    wrong = {name: values[0] for name, values in wanted.items() if config.get(name) not in values}
    for name, value in wrong.items():
        yield fail(
            "redis-durability",
            f"{name} is {config.get(name)}, so Redis could lose rollouts that it has acknowledged",
            f"set `{name} {value}` in redis.conf (or redis-server --{name} {value})",
        )
    if not wrong:
        yield ok("redis-durability", f"appendonly yes, appendfsync {config['appendfsync']}")


def _memory(recipe: Recipe, info: Mapping[str, str], config: Mapping[str, str]) -> Iterator[CheckResult]:
    limit, used = _number(config, "maxmemory"), _number(info, "used_memory")
    policy, need = config.get("maxmemory-policy"), int(MEMORY_FACTOR * recipe.buffer.max_bytes)
    if policy != "noeviction":
        yield fail(
            "redis-eviction",
            f"maxmemory-policy is {policy}, so Redis may drop any key when it is full",
            "set `maxmemory-policy noeviction`",
        )
    # maxmemory 0 means no limit but the machine
    room = limit or _number(info, "total_system_memory")
    what = "maxmemory" if limit else "memory of its machine"
    text = f"{used / GIB:.1f} GiB used, {what} {room / GIB:.1f} GiB; buffer.max_bytes asks for {need / GIB:.1f} GiB"
    if room < need:
        yield warn(
            "redis-memory",
            f"{text}: the buffer may fill Redis before its own bound evicts anything",
            "raise maxmemory (and the memory of the container), or lower buffer.max_bytes",
        )
    else:
        yield ok("redis-memory", text)


def _number(fields: Mapping[str, str], name: str) -> int:
    text = fields.get(name, "0")
    # something else may listen on the port, and answer anything
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"Redis says that {name} is {text[:40]!r}, which is not a number; is that a Redis?")
    return int(text)


def _tuning(config: Mapping[str, str]) -> Iterator[CheckResult]:
    least = _number(config, "auto-aof-rewrite-min-size")
    if least < GIB:
        yield warn(
            "redis-tuning",
            f"auto-aof-rewrite-min-size is {least / 2**20:.0f} MiB: Redis rewrites its file again and again while the "
            "buffer fills",
            "set `auto-aof-rewrite-min-size 1gb`",
        )
    if config.get("rdbcompression") == "yes":
        yield warn(
            "redis-tuning",
            "rdbcompression is yes: token ids hardly compress, and a rewrite takes longer",
            "set `rdbcompression no`",
        )
