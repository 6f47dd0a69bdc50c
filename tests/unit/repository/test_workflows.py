"""The workflows of the repository: they give away as little as they can, and everything that they call is here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
READ = {"contents": "read"}
PERMISSIONS = {
    "ci.yml": {"test": READ, "docs": READ, "bounds": READ, "nightly": READ},
    "release.yml": {"test": READ, "release": {"contents": "write", "id-token": "write"}},
}


def jobs(name: str) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    assert document["permissions"] == {}
    return document["jobs"]


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in jobs(name).values() for step in job["steps"]]


def test_every_workflow_is_looked_at_here() -> None:
    assert {path.name for path in (ROOT / ".github" / "workflows").iterdir()} == set(PERMISSIONS)


@pytest.mark.parametrize("name", PERMISSIONS)
def test_a_workflow_gives_each_job_only_what_it_needs_and_runs_no_movable_action(name: str) -> None:
    assert {job: given["permissions"] for job, given in jobs(name).items()} == PERMISSIONS[name]
    assert len(steps(name)) > 4
    for step in steps(name):
        # a tag of an action can be moved, a commit cannot
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]) if "uses" in step else step["run"]
        # what an expression gives would be read as commands
        assert "${{" not in step.get("run", "")


@pytest.mark.parametrize("name", PERMISSIONS)
def test_what_a_workflow_calls_exists(name: str) -> None:
    commands = "\n".join(step["run"] for step in steps(name))
    targets, makefile = set(re.findall(r"\bmake ([\w-]+)", commands)), (ROOT / "Makefile").read_text()
    assert "docs-site" in targets
    assert [target for target in targets if not re.search(rf"(?m)^{target}:", makefile)] == []
    files = set(re.findall(r"(?:\.ci|deploy|tools)/[\w.-]+", commands))
    assert ".ci/run" in files
    assert [file for file in files if not (ROOT / file).is_file()] == []
