"""The numbers and roles of docs/security.md are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.server import app, auth
from tba.server.serve import KEEP_ALIVE_S, MAX_CONNECTIONS
from tba.tokens import MIN_TOKEN_CHARS, ROLES
from tests.support.secrets_seen import SEEN, Seen

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def row(start: str) -> str:
    (found,) = [line for line in PAGE.splitlines() if line.startswith(f"| {start}")]
    return found


@pytest.mark.parametrize(
    ("start", "numbers"),
    [
        ("connections |", [f"{MAX_CONNECTIONS}"]),
        ("a kept connection", [f"{KEEP_ALIVE_S} s"]),
        ("a slow body", [f"{app.BODY_IDLE_S:g} s", f"{app.MIN_BODY_BYTES_PER_S // 1024} KiB/s"]),
        (
            "requests without a known token",
            [f"{auth.FREE_REFUSALS} of", f"{auth.DELAY_S:g} s", f"{auth.MAX_DELAYED} of"],
        ),
        ("guessing tokens", [f"{MIN_TOKEN_CHARS} characters"]),
    ],
)
def test_limits_are_stated_as_they_are(start: str, numbers: list[str]) -> None:
    assert [number for number in numbers if number not in row(start)] == []


def test_every_role_is_explained() -> None:
    table = PAGE.partition("## Roles")[2].partition("##")[0]
    assert [role for role in ROLES if f"| {role} |" not in table] == []


def test_the_table_of_secrets_is_the_one_that_chart_and_compose_are_compared_with() -> None:
    """tests/chart/test_access.py and tests/unit/test_compose.py look at what is mounted."""
    table = PAGE.partition("### Secrets by service")[2].partition("`setup` and `test`")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    found = {}
    for name, sends, checks, store, other in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines):
        roles = frozenset() if sends == "none" else frozenset(sends.split(", "))
        found[name] = Seen(roles, {"yes": True, "no": False}[checks], store, other)
    assert found == SEEN
