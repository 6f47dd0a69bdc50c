"""docs/operations.md names every wait that the code names, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from tba_buffer.sampling.draw import WAIT_SENTENCES

from tba.api import RunState

ROOT = Path(__file__).parents[2]
NAME = r'"([a-z]+(?:-[a-z]+)*)"'
PATTERNS = (
    rf"\bwait(?:=| = ){NAME}",  # BusyError(wait="..."), log.warning(wait="...")
    rf"\b_wait_name = {NAME}",
    rf"\bwaiting\((?:[a-z_.]+, )?{NAME}",  # status.waiting("...", ...), components.waiting(owner, "...", ...)
    rf"\bnamed_wait\({NAME}",  # status.named_wait("...", ...)
    rf'\bbegin\("[a-z]+", {NAME}',  # waits.begin(owner, "...", ...)
    rf"\b_begin_wait\((?:[a-z_.]+ or )?{NAME}",
    rf"\b_busy\({NAME}",
    rf"\breturn 0, {NAME}",  # leases: no room, because of ...
    r"wait '([a-z-]+)'",  # messages of `tba run`
)


def waits_in_code() -> set[str]:
    """Names of waits in the services, local mode, and what prepares a deployment."""
    names = set(WAIT_SENTENCES)
    names.update(f"run-{state}" for state in get_args(RunState) if state != "running")  # leases.py
    own = [*(ROOT / "tba" / "store").glob("*.py"), *(ROOT / "tba_cli").rglob("*.py")]
    for path in (*(ROOT / "services").glob("*/tba_*/**/*.py"), *own):
        text = path.read_text()
        for pattern in PATTERNS:
            names.update(re.findall(pattern, text))
        names.update(f"{service}-unreachable" for service in re.findall(rf"\bservice={NAME}", text))
    return names


def waits_in_docs() -> set[str]:
    """Names in the first column of the table of waits."""
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition("| wait | who waits | until |\n")[2].partition("\n\n")[0]
    return {name for line in table.splitlines() for name in re.findall(r"`([a-z-]+)`", line.split("|")[1])}


def test_the_table_of_waits_is_complete_and_current() -> None:
    assert waits_in_docs() == waits_in_code()


def test_the_search_finds_the_waits_of_every_service() -> None:
    known = {
        "final-evaluation",
        "unpushed-rollouts",
        "no-version",
        "reward-workers",
        "buffer-unreachable",
        "buffer-poll",
    }
    assert known <= waits_in_code()
