"""docs/operations.md has a line for every finding of `tba doctor`, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FINDING = re.compile(r'\b(?:ok|warn|fail|skip)\(\s*"([a-z-]+)"')


def codes_in_code() -> set[str]:
    paths = [*(ROOT / "tba_cli" / "doctor").rglob("*.py"), ROOT / "tba_cli" / "commands" / "doctor.py"]
    return {code for path in paths for code in FINDING.findall(path.read_text())}


def codes_in_docs() -> set[str]:
    table = (ROOT / "docs" / "operations.md").read_text().partition("| finding |")[2]
    return set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE))


def test_every_finding_has_a_remedy_on_the_page():
    assert codes_in_code() == codes_in_docs()
    assert {"redis-durability", "store-create-only", "clock", "probe-deadline", "recipe"} <= codes_in_code()
