"""Commands that read the run folder of somebody else: what lies there is shown, and nothing of it acts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tba_cli.main import main
from tba_cli.run_folder import RunFolder
from tests.integration.cli.test_view import ended, environ
from tests.support import loopback

__all__ = ["ended", "environ"]
SHOWN = "answer 3"


@pytest.fixture
def evil(ended: RunFolder, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A copy, to be changed by a test; the reader's current folder is the one around it."""
    shutil.copytree(ended.path, tmp_path / "evil")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    return RunFolder(tmp_path / "evil")


@pytest.fixture
def store_calls() -> Iterator[tuple[str, list[str]]]:
    """The URL of a server that answers nothing of use, and the requests that it got."""
    calls: list[str] = []

    class Handler(loopback.Handler):
        def do_GET(self) -> None:
            calls.append(f"{self.path} {self.headers.get('authorization')}")
            self.send_error(404)

    with loopback.Server(Handler) as server:
        yield server.url, calls


def listed(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["rollouts", "list", "--run-dir", str(folder.path)])
    out, err = capsys.readouterr()
    return code, out, err


def test_nothing_that_the_recipe_names_is_started_imported_or_called(evil, tmp_path, capsys, store_calls, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    acted = tmp_path / "acted"
    (tmp_path / "evilmod.py").write_text(f"open({str(acted)!r}, 'w')\n")
    url, calls = store_calls
    document = json.loads(evil.recipe_path.read_bytes())
    document["buffer"] |= {"host": "192.0.2.1"}
    document["searcher"] |= {"engine": "evilmod:Engine"}
    document["tracking"] |= {"trackers": ["evilmod:Tracker"]}
    document["reward"] |= {"host": "192.0.2.1", "port": 1}
    document["store"] = {"url": "s3://bucket/p", "endpoint_url": url, "ca_file": "/nowhere/ca.pem"}
    document["tls"] = {"ca_file": "/nowhere/ca.pem"}
    evil.write_json(evil.recipe_path, document)
    code, out, err = listed(evil, capsys)
    assert (code, SHOWN in out) == (0, True), err
    rollout_id = out.split()[0]
    assert main(["rollouts", "list", "--id", rollout_id, "--run-dir", str(evil.path)]) == 0
    assert (acted.exists(), calls) == (False, [])


@pytest.mark.parametrize("words", ["MODULE LOAD ./m.so", "CONFIG SET dir /tmp", "EVAL return{} 0", "REPLICAOF h 1"])
def test_a_command_that_acts_is_not_carried_out_from_the_append_only_file(evil: RunFolder, capsys, words: str) -> None:
    *_, file = sorted(evil.redis_path.rglob("*.aof"))
    parts = words.split()
    with file.open("a") as aof:
        aof.write(f"*{len(parts)}\r\n" + "".join(f"${len(part)}\r\n{part}\r\n" for part in parts))
    code, out, err = listed(evil, capsys)
    assert (code, out) == (1, "")
    # Redis 6, then 7 and later
    said = (f"Unknown command '{parts[0]}' reading the append", f"error: unknown command '{parts[0]}'")
    assert any(text in err for text in said), err


def test_a_script_of_the_append_only_file_is_not_run(evil: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Redis 6 writes SCRIPT LOAD there itself, so that is no error."""
    *_, file = sorted(evil.redis_path.rglob("*.aof"))
    text = "return redis.call('FLUSHALL')"
    sha = hashlib.sha1(text.encode()).hexdigest()
    with file.open("a") as aof:
        aof.write(f"*3\r\n$6\r\nSCRIPT\r\n$4\r\nLOAD\r\n${len(text)}\r\n{text}\r\n")
        aof.write(f"*3\r\n$7\r\nEVALSHA\r\n$40\r\n{sha}\r\n$1\r\n0\r\n")
    code, out, err = listed(evil, capsys)
    assert (code, SHOWN in out) == (0, True), err


@pytest.mark.parametrize("kind", ["link", "device", "pipe"])
def test_what_is_no_plain_file_is_not_copied(evil: RunFolder, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = evil.redis_path / "more"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else evil.ended_path)
    code, out, err = listed(evil, capsys)
    assert (code, out, str(path) in err) == (2, "", True)
    assert list(Path(os.environ["TMPDIR"]).iterdir()) == []


@pytest.mark.parametrize("name", ["recipe.json", "ended.json", ".tba-run", "summary.json"])
@pytest.mark.parametrize("command", ["rollouts list --run-dir", "status --run-dir", "table"])
def test_a_device_or_a_pipe_in_place_of_a_document_is_an_error(evil, capsys, name, command):
    path = evil.path / name
    path.unlink(missing_ok=True)
    if name == ".tba-run":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert main([*command.split(), str(evil.path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_an_end_beyond_all_dates_is_left_out(evil: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    evil.write_json(evil.ended_path, {"at_s": 1e18, "reason": "x"})
    assert main(["status", "--run-dir", str(evil.path)]) == 0
    assert "its last sign of life" in capsys.readouterr().out


def test_a_token_is_not_sent_to_an_address_that_another_user_wrote(evil: RunFolder, capsys, monkeypatch) -> None:
    (evil.path / "mine.json").write_text("not read")
    endpoints = {"buffer_url": "http://127.0.0.1:9", "tokens_file": str(evil.path / "mine.json")}
    evil.write_json(evil.endpoints_path, endpoints)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with evil.acquire(resume=True, fresh=False):
        assert main(["status", "--run-dir", str(evil.path)]) == 2
    assert f"{evil.endpoints_path} belongs to another user" in capsys.readouterr().err
