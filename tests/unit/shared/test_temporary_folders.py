"""Temporary folders, when their process is killed and when it is not."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tba.temporary_folders import temporary_folder


def test_what_a_killed_process_left_is_deleted_and_what_a_running_one_uses_is_not(tmp_path: Path, monkeypatch) -> None:
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


def test_a_folder_on_a_disk_without_locks_is_used_and_never_looks_abandoned(tmp_path: Path, monkeypatch) -> None:
    def no_locks(_file: object, _what: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        folder = temporary_folder("tba-n-", parent=tmp_path)
        mine = folder.__enter__()
    with temporary_folder("tba-n-", parent=tmp_path):  # of a process whose mount has locks
        assert mine.is_dir()
    folder.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []
