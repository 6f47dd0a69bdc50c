"""The real reward service in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tba.clients import RewardClient
from tba.errors import ServiceError

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
NUM_WORKERS = 2
ITEM_TIMEOUT_S = 2.0
POISON = {"kind": "format", "pattern": "(a+)+$"}
"""A rule that takes longer than the universe has been there for `POISONED_TEXT`, and holds the GIL meanwhile."""
POISONED_TEXT = "a" * 60 + "b"


@contextmanager
def reward_service() -> Iterator[RewardClient]:
    """A client of a service that is ready: 2 workers, tasks `math`, `addition` (inline), `poison` and `quick`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = {
        "math": {"scorers": [{"kind": "math"}]},
        "poison": {"scorers": [POISON]},
        "quick": {"scorers": [{"kind": "format", "pattern": "a", "cache": False}]},
    }
    recipe = {
        "run": {"name": "bench"},
        "model": {"path": "none"},
        "data": {"generator": "addition"},
        "reward": {"port": port, "num_workers": NUM_WORKERS, "item_timeout_s": ITEM_TIMEOUT_S, "tasks": tasks},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.json"
        path.write_text(json.dumps(recipe))
        paths = os.pathsep.join([str(ROOT), str(ROOT / "services" / "reward"), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-m", "tba_reward", "--config", str(path)],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=folder,
            stderr=subprocess.DEVNULL,
        )
        client = RewardClient(f"http://127.0.0.1:{port}", retry_s=0.0, timeout_s=120.0)
        try:
            _wait_ready(client, process)
            yield client
        finally:
            client.close()
            process.terminate()
            process.wait()


def _wait_ready(client: RewardClient, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the reward service ended with exit code {process.returncode}")
        try:
            if all(reward.health == "ok" for reward in client.rewards()):
                return
        except ServiceError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the reward service was not ready within {START_TIMEOUT_S:g} s: {client.rewards()}")
