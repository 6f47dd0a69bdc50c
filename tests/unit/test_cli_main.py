"""What `tba` makes of Ctrl-C while it is imported, and of a disk that is full."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tba.config import Recipe
from tba.service_main import service_main
from tba.store.file import FileStore, explain_full_disk
from tba_cli.commands import config, fork
from tba_cli.main import main
from tests.support.waiting import DEADLINE_S

SLOW_IMPORT = """
import sys, time

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            print("ready", flush=True)
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                if name == "tba.logs":  # as weak references do it in an import: it goes on
                    time.sleep(600)
                raise

sys.meta_path.insert(0, Slow)
from tba_cli.main import main
sys.exit(main(["config", "schema"]))
"""


@pytest.mark.parametrize("module", ["tba_cli.parser", "tba.logs", "tba_cli.commands.config"])
def test_ctrl_c_while_modules_are_imported_is_one_line(module: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT, module], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "interrupted\n")


def test_a_fork_is_resumed_although_the_run_that_it_came_from_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[tuple[Recipe, dict[str, Any]]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fork, "run_local", lambda recipe, **how: resumed.append((recipe, how)) or 0)
    folder = tmp_path / "runs" / "forked"
    folder.mkdir(parents=True)
    document = {"run": {"name": "forked"}, "model": {"path": "m"}, "data": {"generator": "addition"}}
    (folder / "recipe.json").write_text(json.dumps(document))
    assert main(["fork", "gone@1-40", "forked", "--resume"]) == 0
    ((recipe, how),) = resumed
    assert (recipe.run.name, how["resume"], how["folder"].path) == ("forked", True, folder)


def test_a_full_disk_is_named_with_its_folder_and_bytes(tmp_path: Path) -> None:
    plain = OSError(errno.ENOSPC, "No space left on device")  # as write(2) says it: without a file
    said = explain_full_disk(plain, tmp_path / "not" / "there", size_bytes=1234567)
    assert said is not None
    assert said.startswith("the disk at /")
    assert " bytes are free there, and 1,234,567 bytes were to be written (folder " in said
    assert str(tmp_path) in said
    assert said.endswith("); free some space")
    named = explain_full_disk(OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "x")), "/")
    assert named is not None
    assert "(quota)" in named
    assert str(tmp_path) in named
    assert explain_full_disk(OSError(errno.EACCES, "Permission denied"), tmp_path) is None


def test_a_store_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FileStore(tmp_path / "store")
    store.check()
    monkeypatch.setattr("tba.store.file.os.fsync", full)
    for write in (lambda: store.put("a/b", b"12345"), lambda: store.put_file("a/b", Path(__file__))):
        with pytest.raises(
            OSError, match=r"cannot write a/b in file://.*: the disk at /.* is full: .* were to be"
        ) as info:
            write()
        assert "correct store.url" not in str(info.value)


def test_a_command_and_a_service_on_a_full_disk_end_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(config, "schema_command", full)
    monkeypatch.setattr("tba.service_main.configure_logging", lambda *_, **__: None)  # binds stderr
    assert main(["config", "schema"]) == 2
    recipe = tmp_path / "r.toml"
    recipe.write_text('[run]\nname = "demo"\n[model]\npath = "m"\n[data]\ngenerator = "addition"\n')
    assert service_main("buffer", full, ["--config", str(recipe)]) == 2
    command, service = capsys.readouterr().err.splitlines()
    assert command.startswith("error: the disk at /")
    assert service.startswith("error: buffer: the disk at /")
