"""Temporary folders, when their process is killed and when it is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tba.temporary_folders import temporary_folder


def test_what_a_killed_process_left_is_deleted_and_what_a_running_one_uses_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import os, signal; from tba.temporary_folders import temporary_folder\n"
        "with temporary_folder('tba-a-') as folder: (folder / 'big').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environ, timeout=60, check=False)
    [left] = tmp_path.glob("tba-a-*")
    assert (left / "big").exists()
    with temporary_folder("tba-a-") as mine:
        assert not left.exists()
        with temporary_folder("tba-a-") as other:
            assert mine.exists()
            assert other.exists()
    assert list(tmp_path.iterdir()) == []
