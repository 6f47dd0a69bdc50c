"""kill -9 of Redis, also during an AOF rewrite and under a slow fsync; Redis refusing writes; a full disk."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.support.buffer import Stack
from tests.support.chaos import RECOVERY_S, Trial, until_ready
from tests.support.waits import until

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


def until_a_push_fails(trial: Trial) -> None:
    until("a push fails", lambda: sum(pusher.num_failures for pusher in trial.load) > 0)


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


@pytest.mark.nightly
def test_redis_refuses_writes_and_takes_them_again(start: Start, seed: int, count: Counts) -> None:
    """`maxmemory` below what is used: every write is answered with OOM."""

    def refuse_writes(stack: Stack, rng: random.Random) -> None:
        with Redis.from_url(stack.redis.url) as redis:
            redis.config_set("maxmemory", 1_000_000)
            time.sleep(rng.uniform(0.3, 2.5))
            until_a_push_fails(trial)
            redis.config_set("maxmemory", 0)

    stack = start()
    trial = Trial(stack, seed)
    counts = trial.run(refuse_writes)
    assert counts["failed_pushes"] > 0
    count.append(counts)


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no right to mount a small tmpfs (needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.nightly
def test_the_disk_under_the_aof_is_full(small_disk: Path, start: Start, seed: int, count: Counts) -> None:
    """With `appendfsync always` Redis ends itself when it cannot write; it starts again once there is room."""

    def fill(stack: Stack, rng: random.Random) -> None:
        ballast = small_disk / "ballast"
        # unbuffered: a buffer that holds the last bytes would write them again, and fail, when the file is closed
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(64 * 1024))
        deadline = time.monotonic() + RECOVERY_S
        while _writes(stack) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _writes(stack), "Redis still writes to a full disk"
        time.sleep(rng.uniform(0, 0.5))
        until_a_push_fails(trial)
        ballast.unlink()
        if stack.redis.process.poll() is not None:
            stack.redis.start()
        until_ready(stack)

    stack = start(redis_folder=small_disk / "redis")
    trial = Trial(stack, seed)
    counts = trial.run(fill)
    assert counts["failed_pushes"] > 0
    count.append(counts)


def _writes(stack: Stack) -> bool:
    try:
        with Redis.from_url(stack.redis.url, retry=None, socket_timeout=20) as redis:
            return bool(redis.set("probe", "x" * 4096))
    except RedisError:
        return False
