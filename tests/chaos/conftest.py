"""Every chaos test runs CHAOS_TRIALS times (default 1; `make chaos-buffer` runs more) and prints what it counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.buffer import Stack, start_stack

_counts: dict[str, list[Counter[str]]] = {}
_base_seed = int(os.environ.get("CHAOS_SEED", "0"))


@pytest.fixture
def count(request: pytest.FixtureRequest) -> list[Counter[str]]:
    """Append what one trial counted."""
    return _counts.setdefault(request.node.originalname, [])


@pytest.fixture
def seed(trial: int) -> int:
    """Decides when the fault comes and how long it lasts."""
    return _base_seed + trial


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Call it to start Redis and a buffer; both end with the test."""
    stacks: list[Stack] = []

    def start(**sections: Any) -> Stack:
        stacks.append(start_stack(tmp_path, **sections))
        return stacks[-1]

    yield start
    for stack in stacks:
        stack.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from tests.support.chaos import NUM_TRIALS

    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("trial", range(NUM_TRIALS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, counts in _counts.items():
        total = sum(counts, Counter())
        text = ", ".join(f"{key} {value}" for key, value in total.items())
        terminalreporter.write_line(f"{name}: {len(counts)} trials: {text}")
