"""The programs that `tba setup` and `tba data prepare` start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tba.errors import ConfigError
from tba_cli.programs import run_program
from tests.support.waiting import until

SLEEPER = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
path.with_suffix(".half").write_text(str(os.getpid()))
os.replace(path.with_suffix(".half"), path)
time.sleep(3600)
"""
PARENT = """
import pathlib, sys
from tba_cli import programs
class Told(programs.OrphanReaper):
    def add(self, pid):
        super().add(pid)
        pathlib.Path(sys.argv[1]).with_suffix(".told").touch()
programs.OrphanReaper = Told
programs.run_program("sleeper", sys.argv[1:])
"""
"""Says when the reaper has been told: a kill before that leaves the program alone."""
TALKER = "import sys; print('out', sys.argv[1]); sys.exit('error: it went wrong' if sys.argv[1] == 'bad' else 0)"


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_program_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    pid_path = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pid_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    try:
        until("the program runs", pid_path.exists)
        until("the reaper knows it", pid_path.with_suffix(".told").exists)
        pid = int(pid_path.read_text())
        assert not is_gone(pid)
    finally:
        parent.kill()
        parent.wait()
    until("the program is gone", lambda: is_gone(pid))


def test_what_a_program_says_is_returned_or_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talker.py").write_text(TALKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_program("talker", ["good"]) == "out good\n"
    with pytest.raises(ConfigError, match=r"^it went wrong$"):
        run_program("talker", ["bad"])
