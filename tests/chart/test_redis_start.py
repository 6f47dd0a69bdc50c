"""The Redis of the chart starts through start_redis.sh, whose text stands in the command of its container."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tba_cli.redis_server import START_SCRIPT

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/chart/golden/cpu-quickstart.yaml"


def container() -> dict[str, Any]:
    """The container of Redis, as the chart makes it."""
    (pod,) = (
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(GOLDEN.read_text())
        if document and document["kind"] == "StatefulSet" and document["metadata"]["name"].endswith("-redis")
    )
    return pod["containers"][0]


def test_the_chart_has_the_same_script() -> None:
    assert (ROOT / "charts/tba/files/start_redis.sh").read_bytes() == START_SCRIPT.read_bytes()


def test_the_command_of_the_container_checks_the_file_and_becomes_redis(tmp_path: Path) -> None:
    """Programs replace those of Redis: one reports a torn file, the other prints its arguments."""
    data, programs = tmp_path / "data", tmp_path / "bin"
    data.mkdir()
    programs.mkdir()
    (data / "appendonly.aof").write_bytes(b"wholetorn")
    for name, text in {
        "redis-check-aof": 'echo "AOF analyzed: size=9, ok_up_to=5, ok_up_to_line=1, diff=4"; exit 1',
        "redis-server": 'echo "redis-server $*"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "redis-password").write_text('a"word')
    redis, conf = container(), tmp_path / "redis.conf"
    args = [word.replace("/data", str(data)) for word in redis["args"]]
    command = [word.replace("/etc/redis-password", str(tmp_path)) for word in redis["command"]]
    command = [word.replace("/tmp/redis.conf", str(conf)) for word in command]
    done = subprocess.run(
        [*command, *args],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "cut off its last 4 of 9 bytes" in first
    assert last == " ".join(["redis-server", str(conf), *args, "--aof-load-truncated no"])
    assert (data / "appendonly.aof").read_bytes() == b"whole"
    assert conf.read_text() == 'requirepass "a\\"word"\n'
    assert stat.S_IMODE(conf.stat().st_mode) == 0o600
