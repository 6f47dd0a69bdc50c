"""An append-only file that was cut at any byte of its last transaction: nothing that was acknowledged is lost by it.

Redis alone keeps the first commands of a transaction whose last one is torn, and joins them with the next transaction
at the start after that (ADR 16). start_redis.sh cuts the whole transaction off first.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tba_cli.redis_server import START_SCRIPT
from tests.support.redis_process import RedisProcess, redis_server_path, start_redis

STORE = """
redis.call('XADD', KEYS[1], ARGV[1] .. '-0', 'r', ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[3], 'stored', 1)
"""
"""A push: an entry of the log, a payload, a counter. Redis writes it as MULTI, three commands, EXEC."""


def store(url: str, position: int, text: str) -> None:
    with Redis.from_url(url) as client:
        client.eval(STORE, 3, "log", "payloads", "counters", position, text)


def stored(url: str) -> dict[int, str]:
    """Position -> text, which the three keys agree on."""
    with Redis.from_url(url, decode_responses=True) as client:
        entries: Any = client.xrange("log")
        log = {int(entry.split("-")[0]): fields["r"] for entry, fields in entries}
        assert {int(key): text for key, text in client.hgetall("payloads").items()} == log
        assert int(client.hget("counters", "stored") or 0) == len(log)
        return log


def parts_of(data: bytes, begin: int) -> list[tuple[int, int]]:
    """Begin and end of every command from byte `begin` on."""
    parts, at = [], begin
    while at < len(data):
        end = data.index(b"\r\n", at) + 2
        for _ in range(int(data[at + 1 : end - 2])):
            head = data.index(b"\r\n", end) + 2
            end = head + int(data[end + 1 : head - 2]) + 2
        parts.append((at, end))
        at = end
    return parts


class Torn:
    """A file of two transactions; the second begins at byte `begin`.

    Args:
        redis: is stopped.
    """

    def __init__(self, redis: RedisProcess) -> None:
        self.redis = redis
        self.path = redis.folder / "appendonly.aof"
        store(redis.url, 1, "first\r\ntext")
        self.begin = self.path.stat().st_size
        store(redis.url, 2, "never acknowledged")
        redis.stop()
        self.data = self.path.read_bytes()
        self.parts = parts_of(self.data, self.begin)
        assert len(self.parts) == 5, "MULTI, three commands, EXEC"


@pytest.fixture
def torn(tmp_path: Path) -> Iterator[Torn]:
    redis = start_redis(tmp_path / "redis")
    if not (redis.folder / "appendonly.aof").exists():
        redis.stop()
        pytest.skip("Redis from 7 on, whose file has another name: the tests below with a list of files")
    yield Torn(redis)
    redis.stop()


@pytest.fixture
def no_redis(tmp_path: Path) -> Path:
    """A program that ends at once in the place of redis-server, with the real redis-check-aof beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "redis-check-aof").symlink_to(redis_server_path())
    (folder / "redis-server").write_text('#!/bin/sh\necho "started: $*"\n')
    (folder / "redis-server").chmod(0o755)
    return folder / "redis-server"


def start_script(server: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(START_SCRIPT), str(server), "--dir", str(folder), "--appendonly", "yes"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_transaction_torn_anywhere_is_cut_off_whole_and_nothing_acknowledged_is_lost(torn: Torn) -> None:
    """The cuts are behind each command, and in its first line, its middle and its last line."""
    cuts = {at for begin, end in torn.parts for at in (begin + 1, (begin + end) // 2, end - 1, end)} - {len(torn.data)}
    for cut in sorted(cuts):
        torn.path.write_bytes(torn.data[:cut])
        torn.redis.start()
        assert stored(torn.redis.url) == {1: "first\r\ntext"}, f"cut at {cut}"
        store(torn.redis.url, 2, f"acknowledged after a cut at {cut}")
        torn.redis.kill()
        torn.redis.start()
        assert stored(torn.redis.url) == {1: "first\r\ntext", 2: f"acknowledged after a cut at {cut}"}
        torn.redis.kill()


def test_exactly_that_transaction_is_cut_and_it_is_said(torn: Torn, no_redis: Path) -> None:
    """Torn at every byte of its beginning and of its end, and at every fifth between them."""
    begin, end = torn.begin + 1, len(torn.data)
    for cut in sorted({*range(begin, begin + 40), *range(begin, end, 5), *range(end - 30, end)}):
        torn.path.write_bytes(torn.data[:cut])
        script = start_script(no_redis, torn.redis.folder)
        assert script.returncode == 0, script.stdout
        assert torn.path.read_bytes() == torn.data[: torn.begin], f"cut at {cut}: {script.stdout}"
        assert f"cut off its last {cut - torn.begin} of {cut} bytes" in script.stdout
        assert script.stdout.splitlines()[-1].startswith("started: ")


@pytest.mark.parametrize("is_listed", [False, True], ids=["one file", "a list of files"])
def test_a_whole_file_is_left_alone(torn: Torn, no_redis: Path, is_listed: bool) -> None:
    folder, path = torn.redis.folder, torn.path
    if is_listed:
        path = listed(torn)
    for data in (torn.data, torn.data[: torn.begin]):
        path.write_bytes(data)
        script = start_script(no_redis, folder)
        assert script.stdout.splitlines() == [f"started: --dir {folder} --appendonly yes --aof-load-truncated no"]
        assert path.read_bytes() == data


def listed(torn: Torn) -> Path:
    """The file of these transactions as Redis from 7 on keeps it: the last one of a list."""
    parts = torn.redis.folder / "appendonlydir"
    parts.mkdir()
    torn.path.unlink()
    (parts / "appendonly.aof.1.base.aof").write_bytes(torn.data)
    names = ("base.aof seq 1 type b", "incr.aof seq 1 type h", "incr.aof seq 2 type i", "incr.aof seq 3 type i")
    lines = [f"file appendonly.aof.{name.split()[2]}.{name}\n" for name in names]
    (parts / "appendonly.aof.manifest").write_text("".join(lines))
    return parts / "appendonly.aof.3.incr.aof"


def test_of_a_list_of_files_the_last_one_is_repaired(torn: Torn, no_redis: Path) -> None:
    path = listed(torn)
    path.write_bytes(torn.data[:-3])
    script = start_script(no_redis, torn.redis.folder)
    assert script.returncode == 0, script.stdout
    assert path.read_bytes() == torn.data[: torn.begin]


@pytest.mark.parametrize("case", ["whole ones behind a half one", "zeros at the end", "a damaged length", "a hole"])
def test_what_is_not_a_torn_end_is_refused_and_not_touched(torn: Torn, no_redis: Path, case: str) -> None:
    """To cut there would lose what was acknowledged, or Redis would not load it anyhow."""
    half, data = torn.parts[3][0], torn.data
    damaged = {
        "whole ones behind a half one": data[:half] + data[torn.begin :],
        "zeros at the end": data + bytes(100),
        # a length that reaches beyond whole transactions, up to the end
        "a damaged length": data + b"*2\r\n$999999\r\n" + data[torn.begin :],
        "a hole": data[:half] + bytes(4096) + data[half:],
    }[case]
    torn.path.write_bytes(damaged)
    script = start_script(no_redis, torn.redis.folder)
    assert script.returncode == 1, script.stdout
    assert "Redis is not started, and nothing was changed" in script.stdout
    assert "tba buffer load" in script.stdout
    assert "started:" not in script.stdout
    assert torn.path.read_bytes() == damaged


def test_nothing_is_cut_when_the_search_for_whole_transactions_fails(torn: Torn, no_redis: Path, monkeypatch) -> None:
    """Here grep fails as it does without memory, or when it is killed."""
    (no_redis.parent / "grep").write_text('#!/bin/sh\ncat > "$0.read"\nexit 2\n')
    (no_redis.parent / "grep").chmod(0o755)
    monkeypatch.setenv("PATH", f"{no_redis.parent}:{os.environ['PATH']}")
    torn.path.write_bytes(torn.data[:-3])
    script = start_script(no_redis, torn.redis.folder)
    assert script.returncode == 1, script.stdout
    assert "could not be searched" in script.stdout
    assert (no_redis.parent / "grep.read").exists()
    assert torn.path.read_bytes() == torn.data[:-3]


def test_a_file_that_the_script_could_not_check_is_not_cut_by_redis_either(torn: Torn, tmp_path: Path) -> None:
    """redis-server is a script here, which is no redis-check-aof under another name."""
    wrapper = tmp_path / "redis-server"
    wrapper.write_text(f'#!/bin/sh\nexec {redis_server_path()} "$@"\n')
    wrapper.chmod(0o755)
    torn.path.write_bytes(torn.data[:-3])
    script = start_script(wrapper, torn.redis.folder)
    assert "was not checked" in script.stdout
    assert script.returncode == 1
    assert torn.path.read_bytes() == torn.data[:-3]
