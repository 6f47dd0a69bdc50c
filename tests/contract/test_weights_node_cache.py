"""The cache of a machine: a version is made once for all searchers, damaged entries are made again, it is bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tba.errors import ConfigError
from tba.store import FileStore
from tba.weights import LocalVersion, NodeCache, WeightVersions
from tests.support.waits import until
from tests.support.weight_chain import RUN, Chain, version


class Machine:
    """Searchers with a cache, and a store of version 1-0, whole, and three deltas after it."""

    def __init__(self, folder: Path) -> None:
        chain = Chain(FileStore(folder / "store"), folder / "models", 4)
        assert [each.manifest.is_full for each in chain.local] == [True, False, False, False]
        self.published, self.folder, self.reads = chain.local, folder, list[str]()

    def reader(self, *, max_bytes: int = 2**30, **options: Any) -> WeightVersions:
        """A searcher's versions; `reads` has the files that any of them reads from the store."""
        reads = self.reads

        class CountingStore(FileStore):
            def get_file(self, key: str, path: Path, *, max_bytes: int | None = None) -> None:
                reads.append(key)
                time.sleep(0.05)  # so that readers meet
                super().get_file(key, path, max_bytes=max_bytes)

        cache = NodeCache(self.folder / "cache", max_bytes=max_bytes, **options)
        return WeightVersions(CountingStore(self.folder / "store"), RUN, cache=cache)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def weights(local: LocalVersion) -> np.ndarray:
    return load_file(local.paths[0])["weights"]


def test_searchers_that_ask_at_once_make_a_version_once(machine: Machine, tmp_path: Path) -> None:
    def download(number: int) -> LocalVersion:
        return machine.reader().download_tensors(version(3), tmp_path / f"searcher-{number}")

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(download, range(6)))
    assert sorted(each.route for each in found) == ["cache"] * 5 + ["full"]
    assert len(machine.reads) == 4  # the full version and three deltas, once
    for local in found:
        np.testing.assert_array_equal(weights(local), weights(machine.published[3]))
    assert [each.downloaded_bytes for each in found if each.route == "cache"] == [0] * 5


def test_a_damaged_entry_is_made_again_and_what_was_taken_survives_eviction(machine: Machine, tmp_path: Path) -> None:
    first = machine.reader().download_tensors(version(0), tmp_path / "first")
    entry = next((tmp_path / "cache").glob("tensors-*"))
    data = entry.read_bytes()
    entry.unlink()
    entry.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    again = machine.reader().download_tensors(version(0), tmp_path / "again")
    assert again.route == "full"
    np.testing.assert_array_equal(weights(again), weights(machine.published[0]))
    assert machine.reader().download_tensors(version(0), tmp_path / "third").route == "cache"
    # room for one version: the older entries go, the files of searchers do not
    room_bytes = machine.published[3].paths[0].stat().st_size + 1000
    small = machine.reader(max_bytes=room_bytes)
    later = small.download_tensors(version(3), tmp_path / "later")
    entries = [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]
    assert sum(path.stat().st_size for path in entries) <= room_bytes
    np.testing.assert_array_equal(weights(first), weights(machine.published[0]))
    np.testing.assert_array_equal(weights(later), weights(machine.published[3]))
    # a cache that has no room for a version is no obstacle
    assert machine.reader(max_bytes=1).download_tensors(version(2), tmp_path / "none").route == "full"


def test_the_cache_deletes_nothing_else_and_leaves_the_times_of_change_of_files_that_were_taken(tmp_path: Path) -> None:
    folder, source = tmp_path / "cache", tmp_path / "source"
    (folder / "lost+found").mkdir(parents=True)
    (folder / "data.bin").write_bytes(bytes(100))
    for path in folder.iterdir():
        os.utime(path, (1, 1))  # older than every entry
    cache = NodeCache(folder, max_bytes=100)
    for number in range(3):
        source.write_bytes(bytes([number]) * 90)
        cache.add(f"tensors-{number}", source)
        source.unlink()
    assert sorted(path.name for path in folder.iterdir()) == ["data.bin", "lost+found", "tensors-2"]
    assert cache.take("tensors-2", tmp_path / "first", max_bytes=90)
    changed_ns = (tmp_path / "first").stat().st_mtime_ns
    assert cache.take("tensors-2", tmp_path / "second", max_bytes=90)
    assert (tmp_path / "first").stat().st_mtime_ns == changed_ns  # an engine has staged it
    assert not cache.take("tensors-2", tmp_path / "third", max_bytes=89)
    assert not (tmp_path / "third").exists()
    assert not (folder / "tensors-2").exists(), "a damaged entry"


def test_a_cache_whose_folder_was_removed_is_no_obstacle(machine: Machine, tmp_path: Path) -> None:
    versions = machine.reader()
    (tmp_path / "cache").rmdir()
    assert versions.download_tensors(version(1), tmp_path / "got").route == "full"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_stops_as_it_makes_a_version_holds_nobody_up(machine: Machine, sent: signal.Signals) -> None:
    tmp_path = machine.folder
    machine.reader().download_tensors(version(1), tmp_path / "names")
    name = next((tmp_path / "cache").glob("tensors-*")).name
    (tmp_path / "cache" / name).unlink()
    code = (
        "import sys, time; from pathlib import Path; from tba.weights import NodeCache\n"
        f"with NodeCache(Path({str(tmp_path / 'cache')!r}), max_bytes=1).only_one({name!r}):\n"
        "    print('locked', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        found: list[LocalVersion] = []
        waits: list[float | None] = []
        # a stopped process keeps the lock, so that wait ends by its own limit; a killed one gives the lock up at once
        wait_s = 60 if sent == signal.SIGKILL else 3
        versions = machine.reader(wait_s=wait_s, on_wait=waits.append)
        thread = threading.Thread(target=lambda: found.append(versions.download_tensors(version(1), tmp_path / "next")))
        thread.start()
        until("it waits for the other searcher", lambda: waits or found)
        assert sent == signal.SIGSTOP or not found
        os.kill(process.pid, sent)
        thread.join(timeout=30)
        assert ([each.route for each in found], waits) == (["full"], [wait_s, None])
    finally:
        process.kill()
        process.wait()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"store.cache_folder .*file/cache cannot be used"):
        NodeCache(tmp_path / "file" / "cache", max_bytes=1)
