"""kill -9 of Redis, also during an AOF rewrite and under a slow fsync; Redis refusing writes; a full disk."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.support.buffer import Stack
from tests.support.chaos import Trial

Counts = list[Counter[str]]
Start = Callable[..., Stack]


def kill(stack: Stack, rng: random.Random) -> None:
    stack.redis.kill()
    time.sleep(rng.uniform(0, 0.5))
    stack.redis.start()


def freeze(stack: Stack, rng: random.Random) -> None:
    stack.redis.process.send_signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 2))
    stack.redis.process.send_signal(signal.SIGCONT)


def kill_during_rewrite(stack: Stack, rng: random.Random) -> None:
    with Redis.from_url(stack.redis.url) as redis:
        redis.bgrewriteaof()
    time.sleep(rng.uniform(0, 0.08))
    kill(stack, rng)


@pytest.mark.nightly
def test_kill_9_of_redis_while_it_evicts_and_gets_bases(start: Start, seed: int, count: Counts) -> None:
    stack = start(buffer={"max_rollouts": 200, "max_log_events_since_checkpoint": 100})
    counts = Trial(stack, seed, with_compaction=True).run(kill, before_s=2.5)
    assert counts["evicted"] > 0
    assert counts["with_compaction"] > 0
    count.append(counts)


def test_kill_9_of_redis_and_the_buffer(start: Start, seed: int, count: Counts) -> None:
    def both(stack: Stack, rng: random.Random) -> None:
        stack.redis.kill()
        stack.buffer.kill()
        time.sleep(rng.uniform(0, 0.3))
        stack.redis.start()
        stack.buffer.start()

    stack = start()
    count.append(Trial(stack, seed).run(both))


@pytest.mark.nightly
def test_sigstop_of_redis(start: Start, seed: int, count: Counts) -> None:
    stack = start()
    count.append(Trial(stack, seed).run(freeze))


@pytest.mark.nightly
def test_kill_9_of_redis_during_an_aof_rewrite(start: Start, seed: int, count: Counts) -> None:
    stack = start()
    count.append(Trial(stack, seed, num_tokens=2000).run(kill_during_rewrite))


@pytest.fixture(scope="module")
def slow_fsync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the slow fsync with")
    library = tmp_path_factory.mktemp("slow") / "slow_fsync.so"
    source = Path(__file__).with_name("slow_fsync.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.mark.nightly
def test_kill_9_of_redis_under_a_slow_fsync(start: Start, seed: int, count: Counts, slow_fsync: Path) -> None:
    stack = start(redis_environ={"LD_PRELOAD": str(slow_fsync)})
    before_s = time.monotonic()
    assert _writes(stack)
    assert time.monotonic() - before_s > 0.05, "the slow fsync is not in effect"
    count.append(Trial(stack, seed).run(kill, before_s=2.0, after_s=1.5))


def _writes(stack: Stack) -> bool:
    try:
        with Redis.from_url(stack.redis.url, retry=None, socket_timeout=20) as redis:
            return bool(redis.set("probe", "x" * 4096))
    except RedisError:
        return False
