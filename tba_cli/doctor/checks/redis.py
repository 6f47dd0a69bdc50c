"""Check Redis: whether it answers, keeps what it acknowledges, and has room for what the buffer may store.

Only the buffer talks to Redis: where it is not, nothing needs to reach Redis, and a NetworkPolicy may stand between.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping

from tba.config import Recipe
from tba.config.redis import redis_access
from tba.errors import ConfigError
from tba.tls import explain_missing_tls, explain_tls_error
from tba_cli.doctor.target import CheckResult, Target, fail, ok, skip, warn
from tba_cli.redis_server import find_redis_server

TIMEOUT_S = 5.0
"""Deadline of a connection, and of each answer."""
MAX_SHOWN_CHARS = 500
MEMORY_FACTOR = 1.3
"""Redis needs this many times `buffer.max_bytes` (docs/operations.md, Redis)."""
OLDEST_VERSION = (6, 2)
GIB = 2**30


def check_redis(target: Target) -> Iterator[CheckResult]:
    """Check how durable the buffer's Redis is, and how much room it has."""
    if target.is_local and not target.is_going:
        yield ok("redis", f"`tba run` starts {find_redis_server(target.recipe.local.redis_server)}")
        return
    is_installed = importlib.util.find_spec("redis") is not None
    missing = "the package redis is not installed here (pip install 'tba[doctor]')"
    found = _ask(target.recipe) if is_installed else missing
    if isinstance(found, str):
        if "buffer" in target.services and is_installed:
            yield fail("redis", found, "start Redis, or correct buffer.redis_url and buffer.redis_password_file")
        else:
            yield skip("redis", f"{found}; `/readyz` of the buffer says whether its Redis keeps what it accepts")
        return
    info, config = found
    where = redis_access(target.recipe).shown
    yield ok("redis", f"Redis {info.get('redis_version')} at {where}, role {info.get('role')}")
    yield from _state(info)
    if config is None:
        yield fail(
            "redis-durability",
            "Redis does not allow CONFIG GET, so it is unknown whether it keeps what it accepts",
            "allow the user of buffer.redis_url CONFIG GET (ACL SETUSER ... +config|get); the buffer needs it too",
        )
        return
    yield from _durability(config)
    yield from _memory(target.recipe, info, config)


def _ask(recipe: Recipe) -> tuple[dict[str, str], dict[str, str] | None] | str:
    """Return INFO and the configuration of the buffer's Redis, None where CONFIG GET is not allowed; or a sentence
    that says why it cannot be asked."""
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
        return str(error)
    where, ca_file = f"Redis at {access.shown}", recipe.tls.ca_file
    secret = client.get_connection_kwargs().get("password")
    try:
        with client:
            client.ping()
            info = {name: str(value) for name, value in client.info().items()}
            try:
                return info, {str(name): str(value) for name, value in client.config_get("*").items()}
            except ResponseError:
                return info, None
    except (AuthenticationError, ResponseError) as error:
        return f"{where} answers: {_hidden(error, secret)}"
    except (ConnectionError, TimeoutError, OSError) as error:
        # the SSLError lies beneath the error of the library
        if (problem := explain_tls_error(error, where=where, ca_file=ca_file, plain="redis")) is not None:
            return problem
        if (problem := explain_missing_tls(access.shown, ca_file=ca_file)) is not None:
            return f"Redis at {problem}"
        problem = f"{where} cannot be reached ({type(error).__name__}: {_hidden(error, secret)})"
        if access.url.startswith("rediss:") and isinstance(error, TimeoutError):
            problem += "; a server without TLS never answers a TLS client: should it be redis://?"
        return problem
    except Exception as error:  # the library has no class for an answer that is not of the protocol
        return f"{where}: this is not Redis ({type(error).__name__}: {_hidden(error, secret)})"


def _hidden(error: Exception, secret: str | None) -> str:
    """Return the text of an error without the password: some servers answer with the words of the command."""
    text = str(error)
    return (text.replace(secret, "***") if secret else text)[:MAX_SHOWN_CHARS]


def _state(info: Mapping[str, str]) -> Iterator[CheckResult]:
    # two numbers: a third one never decides
    version = tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", "0"))[:2])
    if version < OLDEST_VERSION:
        yield fail("redis", f"Redis is {info.get('redis_version')}", "use Redis 6.2 or newer, or Valkey")
    if info.get("redis_mode") == "cluster":
        remedy = "use one without (cluster-enabled no); a replica of it may stand by"
        yield fail("redis", "this Redis runs in cluster mode, which splits the keys of a run", remedy)
    if info.get("role") != "master":
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        yield fail("redis", f"this Redis is a replica of {primary}", "point buffer.redis_url at the primary")
    if info.get("aof_last_write_status", "ok") != "ok":
        yield fail("redis", "Redis could not write its append-only file", "free space on its disk")


def _durability(config: Mapping[str, str]) -> Iterator[CheckResult]:
    wanted = {
        "appendonly": "yes",
        "appendfsync": "always",
        "no-appendfsync-on-rewrite": "no",
        # with `yes` Redis starts with a torn file, and drops the end of it
        "aof-load-truncated": "no",
        # with any other policy Redis drops keys when it is full
        "maxmemory-policy": "noeviction",
    }
    wrong = {name: value for name, value in wanted.items() if config.get(name) != value}
    for name, value in wrong.items():
        yield fail(
            "redis-durability",
            f"{name} is {config.get(name)}, so Redis could lose rollouts that it has acknowledged",
            f"set `{name} {value}` in redis.conf (or redis-server --{name} {value})",
        )
    if not wrong:
        yield ok("redis-durability", "appendonly yes, appendfsync always")


def _memory(recipe: Recipe, info: Mapping[str, str], config: Mapping[str, str]) -> Iterator[CheckResult]:
    limit, used = _number(config, "maxmemory"), _number(info, "used_memory")
    need = int(MEMORY_FACTOR * recipe.buffer.max_bytes)
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
