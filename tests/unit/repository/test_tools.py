"""The audit of dependencies: `make audit` reads a report, and never takes silence for health."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "audit.py"
FLAW = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"], "description": "long"}


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(monkeypatch: pytest.MonkeyPatch, audit: ModuleType, **by_service: Any) -> None:
    monkeypatch.setattr(audit, "ask", lambda service, _: by_service[service])


def good(name: str, *flaws: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(flaws)}


def test_a_known_vulnerability_fails_with_its_remedy(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, audit, pypi={"dependencies": [good("a", FLAW), good("b")]})
    assert audit.main(["x"]) == 1
    said = capsys.readouterr().out
    assert "a 1.0: PYSEC-1, CVE-1; fixed in 2.0" in said
    assert "2 packages looked up, 0 unknown there, 1 vulnerabilities" in said


def test_where_no_database_answers_it_says_that_it_looked_at_nothing(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = {"dependencies": [{"name": "a", "skip_reason": "not found"}]}
    answers(monkeypatch, audit, pypi=mirror, osv="no such host")
    assert audit.main(["x"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("skipped: no database of vulnerabilities could be asked")
    assert "vulnerabilities\n" not in said.removeprefix("skipped: no database of vulnerabilities")
    assert "osv: no such host" in said
