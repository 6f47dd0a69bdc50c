"""The real reward service in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tba.clients import RewardClient
from tests.support.reward_process import running_reward

NUM_WORKERS = 2
ITEM_TIMEOUT_S = 2.0
POISONED_TEXT = "a" * 60 + "b"
"""The rule of the task `poison` takes longer over it than the universe has been there, and holds the GIL meanwhile."""
TASKS = {
    "math": {"scorers": [{"kind": "math", "timeout_s": ITEM_TIMEOUT_S}]},
    "poison": {"scorers": [{"kind": "format", "pattern": "(a+)+$", "timeout_s": ITEM_TIMEOUT_S}]},
    "quick": {"scorers": [{"kind": "format", "pattern": "a", "timeout_s": ITEM_TIMEOUT_S}]},
}


@contextmanager
def reward_service() -> Iterator[RewardClient]:
    """A client of a service that is ready: 2 workers, tasks `math`, `addition` (inline), `poison` and `quick`."""
    section = {"num_workers": NUM_WORKERS, "tasks": TASKS}
    with tempfile.TemporaryDirectory() as folder, running_reward(Path(folder), **section) as url:
        client = RewardClient(url, retry_s=0.0, timeout_s=120.0)
        try:
            yield client
        finally:
            client.close()
