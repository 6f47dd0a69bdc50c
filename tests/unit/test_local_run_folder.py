"""Run folders: who may begin, resume, start over, and that two supervisors never share one."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tba.errors import ConfigError
from tba_cli.run_folder import RunFolder


@pytest.fixture
def begun(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "demo")
    with folder.acquire(resume=False, fresh=False):
        folder.write_json(folder.recipe_path, {"run": {"name": "demo"}})
    return folder


def test_a_new_folder_is_made(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    with folder.acquire(resume=False, fresh=False):
        assert folder.marker_path.read_text() == f"{os.getpid()}\n"


def test_a_folder_with_a_run_needs_resume_or_fresh(begun):
    with pytest.raises(ConfigError, match=r"--resume.*--fresh.*--run-name"), begun.acquire(resume=False, fresh=False):
        pass
    for flags in ({"resume": True, "fresh": False}, {"resume": False, "fresh": True}):
        with begun.acquire(**flags):
            pass


def test_a_start_that_failed_before_training_needs_no_flag(tmp_path):
    folder = RunFolder(tmp_path / "demo")
    for _ in range(2):
        with folder.acquire(resume=False, fresh=False):
            folder.write_json(folder.config_path, {})


def test_there_is_nothing_to_resume_in_a_new_folder(tmp_path):
    with (
        pytest.raises(ConfigError, match="no run to resume"),
        RunFolder(tmp_path / "new").acquire(resume=True, fresh=False),
    ):
        pass
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, fresh):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run folder"), RunFolder(tmp_path).acquire(resume=False, fresh=fresh):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_two_supervisors_cannot_hold_the_same_folder(begun):
    with (
        begun.acquire(resume=True, fresh=False),
        pytest.raises(ConfigError, match=f"in use by another `tba run` \\(process {os.getpid()}\\)"),
        RunFolder(begun.path).acquire(resume=True, fresh=False),
    ):
        pass


def test_clear_deletes_all_but_the_lock_and_follows_no_link(begun, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (begun.path / "link").symlink_to(outside)
    with begun.acquire(resume=False, fresh=True):
        begun.make_folders()
        begun.clear()
        assert os.listdir(begun.path) == [".tba-run"]
    assert (outside / "kept").exists()


def test_json_files_are_replaced_whole(begun):
    begun.write_json(begun.summary_path, {"steps": 1})
    begun.write_json(begun.summary_path, {"steps": 2})
    assert json.loads(begun.summary_path.read_text()) == {"steps": 2}
    assert not list(begun.path.glob("*.part"))


def test_nobody_else_looks_into_a_run_folder_and_every_start_has_new_secrets(tmp_path: Path) -> None:
    folder, before = RunFolder(tmp_path / "demo"), ""
    folder.path.mkdir(mode=0o755)
    for _ in range(2):
        with folder.acquire(resume=False, fresh=False):
            folder.make_folders()
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        files = [path for path in folder.secrets_path.rglob("*") if path.is_file()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        password = folder.redis_password_path.read_text().strip()
        assert folder.redis_conf_path.read_text() == f"requirepass {password}\n"
        now = "".join(path.read_text() for path in files)
        assert len(password) == 48
        assert password not in before
        before = now
