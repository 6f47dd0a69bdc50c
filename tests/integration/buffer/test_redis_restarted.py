"""An external Redis, started again over a file in which a transaction was written by half.

It has `aof-load-truncated no`, without which the buffer takes none: Redis does not start over a torn end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buffer_reads import readyz
from tests.support.metrics import values
from tests.support.redis_process import OF_OTHERS, RedisProcess, free_port
from tests.support.redis_world import RedisWorld
from tests.support.waits import until

LOG = b"tba:test:log"
MULTI = b"*1\r\n$5\r\nMULTI\r\n"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RedisWorld]:
    redis = RedisProcess(folder=tmp_path / "redis", port=free_port(), options=OF_OTHERS, as_we_start_it=False)
    redis.start()
    made = RedisWorld(redis, num_pushes=3)
    assert made.client.stats().num_rollouts == 12  # the buffer has read them back; it does so every second
    yield made
    made.stop()


def restart(redis: RedisProcess) -> None:
    redis.kill()
    redis.start()


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def aof(folder: Path) -> Path:
    """The file that Redis appends to; from Redis 7 on the last one of a list."""
    return max(folder.rglob("*.aof"), key=lambda path: path.stat().st_mtime_ns)


def last_push(data: bytes) -> tuple[int, int, bytes]:
    """Return the position of the last push's MULTI in these bytes, its position in the log, and its records."""
    begin = data.rindex(MULTI + b"*5\r\n$4\r\nXADD\r\n")
    words = data[begin + len(MULTI) :].split(b"\r\n", 9)
    position = int(words[6].split(b"-")[0])
    at = data.index(b"$1\r\nr\r\n$", begin) + 8
    end = data.index(b"\r\n", at)
    return begin, position, data[end + 2 : end + 2 + int(data[at:end])]


def half_push(position: int, records: bytes) -> bytes:
    """The first two commands of a push of other rollouts, which was never acknowledged."""
    others = b"".join(bytes(16) + records[at + 16 : at + 57] for at in range(0, len(records), 57))
    return (
        MULTI
        + command(b"XADD", LOG, b"%d-0" % position, b"r", others)
        + command(b"HSET", b"tba:test:payloads", bytes(16), b"x")
    )


def test_a_redis_of_others_does_not_start_over_a_torn_end_until_the_script_has_repaired_it(world: RedisWorld) -> None:
    world.redis.kill()
    path = aof(world.redis.folder)
    data = path.read_bytes()
    _, position, records = last_push(data)
    path.write_bytes(data + half_push(position + 4, records) + command(b"HSET", b"tba:test:payloads", b"y", b"z")[:-9])
    with pytest.raises(RuntimeError, match="redis-server did not start"):
        world.redis.start()
    assert len(path.read_bytes()) > len(data), "Redis cuts nothing"
    world.redis.as_we_start_it = True
    world.redis.start()
    assert aof(world.redis.folder).read_bytes() == data
    until("a push is accepted", lambda: world.why_refused() is None)
    restart(world.redis)
    until("a push is accepted again", lambda: world.why_refused() is None)
    assert world.outcomes_again() == {"duplicate"}
    assert len(world.acknowledged) >= 20


def test_a_log_that_is_another_one_than_was_acknowledged_is_refused_at_once(world: RedisWorld) -> None:
    """A half push takes the place of the last but one: there is no gap in the log, and its end is where it was."""
    world.redis.kill()
    path = aof(world.redis.folder)
    data = path.read_bytes()
    begin, position, records = last_push(data[: last_push(data)[0]])
    damaged = data[:begin] + half_push(position, records) + data[begin:]
    path.write_bytes(damaged)
    world.redis.start()
    until("it is refused", lambda: "is not the one that was acknowledged" in (world.why_refused() or ""), deadline_s=60)
    until("not ready", lambda: readyz(world.buffer.url)[0] == 503)
    assert "tba buffer load" in readyz(world.buffer.url)[1]["detail"]
    assert values(world.buffer.url, "tba_redis_durable")[()] == 0
    assert world.client.run().state == "running"  # reading continues
    assert aof(world.redis.folder).read_bytes()[: len(damaged)] == damaged, "somebody may yet repair it"
