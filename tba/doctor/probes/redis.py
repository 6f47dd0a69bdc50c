"""Redis: whether it is there, keeps what it accepts, and has room for what the buffer may store.

Only the buffer talks to Redis. From elsewhere, where a NetworkPolicy may stand between, the buffer is asked what it
thinks of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tba.config import Recipe
from tba.doctor.finding import Finding, fail, ok, skip, warn
from tba.doctor.patient import Answer, Patient
from tba.doctor.resp import RespError, open_redis
from tba.errors import ConfigError
from tba.local.redis_server import find_redis_server

STRONG_ENOUGH = {"always": ("always",), "everysec": ("everysec", "always")}
MEMORY_FACTOR = 1.3
"""Redis needs this many times `buffer.max_bytes` (docs/operations.md, Redis)."""
OLDEST_VERSION = (6, 2)
GIB = 2**30


def probe_redis(patient: Patient) -> Iterator[Finding]:
    """What the buffer's Redis promises, and how much room it has."""
    if patient.is_local and not patient.is_going:
        try:
            yield ok("redis", f"`tba run` starts {find_redis_server(patient.recipe.local.redis_server)}")
        except ConfigError as error:
            yield fail("redis", str(error), "install one of those")
        return
    try:
        with open_redis(patient.recipe) as redis:
            info, config = redis.info(), redis.config("*")
    except RespError as error:
        yield from _from_afar(patient, str(error))
        return
    yield ok("redis", f"Redis {info.get('redis_version')} at {redis.where}, role {info.get('role')}")
    yield from _state(info)
    if config is None:
        yield fail(
            "redis-config",
            "Redis does not let CONFIG GET be called, so nobody knows whether it keeps what it accepts",
            "allow the user of buffer.redis_url CONFIG GET (ACL SETUSER ... +config|get); the buffer needs it too",
        )
        return
    yield from _durability(patient.recipe, config)
    yield from _memory(patient.recipe, info, config)
    yield from _tuning(config)


def _from_afar(patient: Patient, reason: str) -> Iterator[Finding]:
    answer = patient.ask("buffer", "/metrics")
    if isinstance(answer, Answer) and answer.status == 200:
        found = re.search(rb"^tba_redis_keeps_promise (\S+)", answer.body, re.MULTILINE)
        if found is None:
            yield fail(
                "redis",
                f"{patient.url('buffer')} has no tba_redis_keeps_promise in its /metrics, so it is no buffer service",
                "correct buffer.url",
            )
            return
        if found[1] in (b"1", b"1.0"):
            yield ok("redis", "not reached from here; the buffer says that Redis keeps what it acknowledges")
            return
        yield fail(
            "redis",
            "the buffer says that Redis does not keep its promise now",
            "its /readyz says why; docs/operations.md, Redis, has a line for each state",
        )
    elif "buffer" in patient.services:
        yield fail("redis", reason, "start Redis, or correct buffer.redis_url and buffer.redis_password_file")
    else:
        yield skip("redis", f"not reached from here, where nobody needs it ({reason})")


def _state(info: Mapping[str, str]) -> Iterator[Finding]:
    version = tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", "0"))[:2])
    if version < OLDEST_VERSION:
        yield fail("redis-version", f"Redis is {info.get('redis_version')}", "use Redis 6.2 or newer, or Valkey")
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
            "the last rewrite of the append-only file failed; Redis goes on with the old one, which grows",
            "give its disk and memory room for a second copy",
        )


def _durability(recipe: Recipe, config: Mapping[str, str]) -> Iterator[Finding]:
    wanted = {
        "appendonly": ("yes",),
        "appendfsync": STRONG_ENOUGH[recipe.buffer.appendfsync],
        "no-appendfsync-on-rewrite": ("no",),
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


def _memory(recipe: Recipe, info: Mapping[str, str], config: Mapping[str, str]) -> Iterator[Finding]:
    limit, used = _number(config, "maxmemory"), _number(info, "used_memory")
    policy, need = config.get("maxmemory-policy"), int(MEMORY_FACTOR * recipe.buffer.max_bytes)
    if policy != "noeviction":
        yield fail(
            "redis-eviction",
            f"maxmemory-policy is {policy}, so Redis may drop any key when it is full",
            "set `maxmemory-policy noeviction`",
        )
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
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"Redis says that {name} is {text[:40]!r}, which is no number; is that a Redis?")
    return int(text)


def _tuning(config: Mapping[str, str]) -> Iterator[Finding]:
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
