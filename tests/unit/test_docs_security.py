"""The numbers and roles of docs/security.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tba.service import app, protocol, strangers, waiting_room
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
        ("connections |", [f"{waiting_room.MAX_CONNECTIONS}"]),
        ("a connection without a request", [f"{protocol.HEAD_TIMEOUT_S:g} s"]),
        ("endless heads", [f"{protocol.MAX_HEAD_BYTES // 1024} KiB"]),
        ("pipelining", [f"{protocol.MAX_QUEUED_REQUESTS} requests"]),
        ("a slow body", [f"{app.BODY_IDLE_S:g} s", f"{app.MIN_BODY_BYTES_PER_S // 1024} KiB/s"]),
        ("an answer that nobody", [f"{protocol.MIN_READ_BYTES // 1024} KiB", f"{protocol.WRITE_STALL_S:g} s"]),
        (
            "requests without a known token",
            [f"{strangers.FREE_REFUSALS} of", f"{strangers.HOLD_S:g} s", f"{strangers.MAX_HELD} of"],
        ),
        ("guessing tokens", [f"{MIN_TOKEN_CHARS} characters"]),
        ("a TLS handshake", ["10 s"]),
    ],
)
def test_limits_are_stated_as_they_are(start: str, numbers: list[str]) -> None:
    assert [number for number in numbers if number not in row(start)] == []


def test_every_role_and_every_reason_of_a_closed_connection_is_explained() -> None:
    table = PAGE.partition("## Roles")[2].partition("##")[0]
    assert [role for role in ROLES if f"| {role} |" not in table] == []
    code = (ROOT / "tba" / "service" / "protocol.py").read_text()
    operations = (ROOT / "docs" / "operations.md").read_text()
    (metric,) = [line for line in operations.splitlines() if line.startswith("| `tba_connections_closed_total`")]
    reasons = set(re.findall(r'(?:give_up|count_closed)\("([a-z-]+)"', code))
    reasons |= set(re.findall(r'_refuse\(.*, "([a-z-]+)"\)', code))
    assert len(reasons) == 8
    assert [reason for reason in reasons if reason not in metric] == []


def test_the_table_of_secrets_is_the_one_that_chart_and_compose_are_compared_with() -> None:
    """tests/chart/test_access.py and tests/unit/test_compose.py look at what is mounted."""
    table = PAGE.partition("### Who sees which secret")[2].partition("`setup` and `test`")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    found = {}
    for name, sends, checks, store, other in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines):
        roles = frozenset() if sends == "none" else frozenset(sends.split(", "))
        found[name] = Seen(roles, {"yes": True, "no": False}[checks], store, other)
    assert found == SEEN
