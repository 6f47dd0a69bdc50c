"""The real reward service in a process of its own."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.buffer import make_recipe, start_service, write_recipe
from tests.support.redis_process import free_port
from tests.support.waits import DEADLINE_S


@contextmanager
def running_reward(folder: Path, **section: Any) -> Iterator[str]:
    """Run a service with this section `[reward]` of its recipe; yield its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with reward_of(write_recipe(folder / "recipe.json", make_recipe(reward={"port": port, **section})), url):
        yield url


@contextmanager
def reward_of(recipe: Path, url: str, environ: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Run the service of a recipe in a file, with a log beside it, until it is ready; kill it at the end.

    Args:
        url: of the service, as the recipe has it.
        environ: more variables.

    Raises:
        RuntimeError: it did not start.
    """
    log = recipe.with_name("reward.log")
    process = start_service("tba_reward", recipe, log, **environ)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the reward service did not start: {log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    """Return True if a service answers `/readyz` well."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False
