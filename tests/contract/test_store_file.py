"""The embedded store: what a killed writer leaves, and what a full or forbidden folder says."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tba.config.sections import StoreSection
from tba.errors import ConfigError, StoreUnavailableError
from tba.store import FileStore, open_store

WRITER = """
import itertools, sys
from pathlib import Path
from tba.store import FileStore
store = FileStore(Path(sys.argv[1]))
for n in itertools.count(1):
    store.put("a/object", bytes([n % 256]) * 200_000)
    print(n, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_object(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for pause_s in (0.0, 0.003, 0.011, 0.02):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(pause_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        data = store.get("a/object")
        assert (len(data), len(set(data))) == (200_000, 1)
        assert store.list("") == ["a/object"], "temporary files are never listed"


def test_check_removes_what_a_writer_left_long_ago_and_nothing_else(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a/object", b"1")
    old, young = tmp_path / "a" / ".tmp-old", tmp_path / "a" / ".tmp-young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 100_000, time.time() - 100_000))
    store.check()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".tmp-young", "object"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = FileStore(tmp_path / "file" / "store")
    with pytest.raises(StoreUnavailableError, match=r"Not a directory: .*; correct store\.url"):
        store.check()
    with pytest.raises(StoreUnavailableError, match="cannot write a"):
        store.put("a", b"1")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"url": "http://bucket/x"}, "is not a store: use file://folder"),
        ({"url": "s3://"}, "is not a store"),
        ({"url": "s3://bucket/a//b"}, "is not allowed"),
        ({"url": "s3://bucket/x", "endpoint_url": "localhost:9000"}, "is not a URL such as"),
        ({"url": "s3://b!d/x", "endpoint_url": "http://"}, "is not a URL such as"),
    ],
)
def test_a_wrong_store_section_says_what_to_write(section: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(StoreSection(**section))  # pyright: ignore[reportArgumentType]


def test_a_relative_file_url_is_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(StoreSection(url="file://store"))
    store.put("a", b"1")
    assert ((tmp_path / "store" / "a").read_bytes(), store.url) == (b"1", f"file://{tmp_path}/store")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_disk_without_hard_links_is_refused(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(StoreUnavailableError, match="has no hard links"):
        FileStore(tmp_path).check(write=True)
