"""Run folders, and the run that a command means."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tba.errors import ConfigError
from tba.temporary_folders import temporary_folder
from tba_cli.doctor.target import target_of
from tba_cli.main import main
from tba_cli.parser import parse_arguments
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import open_client
from tests.support.buffer import make_recipe

# ---- Run folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "demo")
    with folder.acquire(resume=False, fresh=False):
        folder.write_json(folder.recipe_path, {"run": {"name": "demo"}})
    return folder


def test_doctor_takes_the_lock_for_a_run_in_progress_and_not_the_files_of_a_killed_one(begun: RunFolder) -> None:
    recipe = make_recipe(run="demo", local={"runs_dir": str(begun.path.parent)})
    begun.write_json(begun.config_path, recipe.model_dump(mode="json"))
    begun.write_json(begun.endpoints_path, {})
    assert not target_of(recipe, service=None).is_going
    with begun.acquire(resume=True, fresh=False):
        assert target_of(recipe, service=None).is_going


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kept", ["summary.json", "store/runs/demo/checkpoints/1-4/manifest.json"])
def test_work_without_its_recipe_is_deleted_by_fresh_alone(begun: RunFolder, kept: str, *, resume: bool) -> None:
    work = begun.path / kept
    work.parent.mkdir(parents=True, exist_ok=True)
    work.write_text("{}")
    begun.recipe_path.unlink()
    with pytest.raises(ConfigError), begun.acquire(resume=resume, fresh=False):
        pass
    assert work.exists()
    with begun.acquire(resume=False, fresh=True):
        pass


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
    with begun.recipe_path.open() as reader:
        begun.write_json(begun.recipe_path, {"steps": 2})
        assert json.load(reader) == {"run": {"name": "demo"}}
    assert json.loads(begun.recipe_path.read_text()) == {"steps": 2}


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
        assert folder.redis_conf_path.read_text().splitlines()[0] == f"requirepass {password}"
        now = "".join(path.read_text() for path in files)
        assert len(password) == 48
        assert password not in before
        before = now


# ---- Which run a command talks to -----------------------------------------------------------------------------------


def url_of(*words: str) -> str:
    client = open_client(parse_arguments(["status", *words]))
    client.close()
    return client.base_url


def write_endpoints(folder: Path, port: int, *, at_s: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "endpoints.json"
    path.write_text(json.dumps({"buffer_url": f"http://127.0.0.1:{port}", "tokens_file": None}))
    os.utime(path, (at_s, at_s))


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two runs that are going; a third was killed, later than they began."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as going:
        for name in ("older", "newer"):
            going.enter_context(RunFolder(tmp_path / "runs" / name).acquire(resume=False, fresh=True))
        write_endpoints(tmp_path / "runs" / "older", 1111, at_s=1000)
        write_endpoints(tmp_path / "runs" / "newer", 2222, at_s=2000)
        write_endpoints(tmp_path / "runs" / "killed", 3333, at_s=3000)
        yield tmp_path


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ([], "http://127.0.0.1:2222"),  # the newest
        (["older"], "http://127.0.0.1:1111"),
        (["--run-dir", "runs/older"], "http://127.0.0.1:1111"),
        (["--url", "http://buffer:8700/"], "http://buffer:8700"),
    ],
)
def test_a_run_is_found_by_name_by_folder_or_by_url(two_runs, words, url):
    assert url_of(*words) == url


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["killed"], "run 'killed' is not in progress"),
        (["older"], "run 'older' is starting or ending"),
        (["--run-dir", "."], "is not in progress"),
    ],
)
def test_a_run_without_a_service_is_a_clear_error(two_runs, words, says):
    (two_runs / "runs" / "older" / "endpoints.json").unlink()
    with pytest.raises(ConfigError, match=says):
        url_of(*words)


@pytest.mark.parametrize("command", ["status", "ledger check", "rollouts list", "view", "buffer accept-loss"])
def test_a_run_that_never_began_is_a_sentence_with_the_runs_that_did(two_runs, command, capsys):
    for number, name in enumerate(["older", "newer"]):
        marker = two_runs / "runs" / name / ".tba-run"
        marker.touch()
        os.utime(marker, (number, number))
    assert main([*command.split(), "oldr"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: there is no run 'oldr': ")
    assert said.endswith(
        "the runs beside it are: newer, older; name one of them, give --run-dir DIR or --url URL, or start one with "
        "`tba run RECIPE`"
    )


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    def no_locks(_file: object, _what: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(ConfigError, match=r"does not lock files .*; use a folder on a disk of this machine"):
        folder.acquire(resume=False, fresh=False).__enter__()
    assert not folder.is_in_use


def test_the_socket_of_redis_has_a_path_that_the_system_takes(tmp_path: Path) -> None:
    with temporary_folder("tba-", parent=Path("/tmp")) as place:
        near = RunFolder(place / "r")
        with near.acquire(resume=False, fresh=True):
            assert near.redis_socket_path == near.secrets_path / "redis.sock"
            assert not near.redis_socket_path.exists()
    far = RunFolder(tmp_path / ("n" * 60) / ("m" * 60))
    with far.acquire(resume=False, fresh=True):
        place = far.redis_socket_path.parent
        assert place.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(far.redis_socket_path))
    assert not place.exists()


def test_redis_listens_in_the_temporary_folder_where_a_disk_takes_no_sockets(tmp_path, monkeypatch) -> None:
    class NoSocket(socket.socket):
        def bind(self, address: Any, /) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))  # exFAT

    with temporary_folder("tba-", parent=Path("/tmp")) as place:
        folder = RunFolder(place / "r")
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", NoSocket)
            with folder.acquire(resume=False, fresh=True):
                assert not folder.redis_socket_path.is_relative_to(place)
                assert folder.redis_socket_path.parent.stat().st_mode & 0o777 == 0o700
