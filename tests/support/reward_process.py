"""The real reward service in a process of its own."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.buffer import start_service
from tests.support.redis_process import free_port
from tests.support.waits import DEADLINE_S


class RewardProcess:
    """`python -m tba_reward` with a log beside its recipe; killed at the end of a `with` block.

    Args:
        url: URL of the service, as in the recipe.
        environ: more environment variables of the process.
    """

    def __init__(self, recipe: Path, url: str, environ: Mapping[str, str] = MappingProxyType({})) -> None:
        self.url, self.log = url, recipe.with_name("reward.log")
        self.process = start_service("tba_reward", recipe, self.log, **environ)

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_ready(self) -> None:
        """Wait until it answers `/readyz` with 200.

        Raises:
            RuntimeError: it did not start.
        """
        deadline = time.monotonic() + DEADLINE_S
        while not is_ready(self.url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the reward service did not start: {self.log.read_text()[-3000:]}")
            time.sleep(0.05)


def start_reward(folder: Path, environ: Mapping[str, str] = MappingProxyType({}), **section: Any) -> RewardProcess:
    """Start a service whose recipe has only the section `[reward]` with these settings; do not wait for it."""
    (folder / "recipe.json").write_text(json.dumps({"reward": {"port": (port := free_port()), **section}}))
    return RewardProcess(folder / "recipe.json", f"http://127.0.0.1:{port}", environ)


@contextmanager
def running_reward(folder: Path, **section: Any) -> Iterator[str]:
    """Run a service with these settings in `[reward]` until the end of the block; yield its URL when it is ready."""
    with start_reward(folder, **section) as service:
        service.wait_ready()
        yield service.url


@contextmanager
def reward_of(recipe: Path, url: str, environ: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Run the reward service of a recipe file until the end of the block, which begins when it is ready."""
    with RewardProcess(recipe, url, environ) as service:
        service.wait_ready()
        yield


def is_ready(url: str) -> bool:
    """Return whether a service answers `/readyz` with 200."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False
