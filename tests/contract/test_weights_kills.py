"""Processes that publish or download a weight version: kill -9 at every place that counts, and two of them at once."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tba.config.sections import StoreSection
from tba.errors import ObjectExistsError
from tba.store import FileStore, ObjectStore
from tba.wire import Manifest
from tests.support.s3_server import CREDENTIALS
from tests.support.weight_chain import Chain, act_and_die, publish, tensors_of, version

Die = Callable[[str, Path, int, int | None], int]


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes from one that has imported everything and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.weight_chain"])
    return context


@pytest.fixture
def die(processes: ForkServerContext, section: StoreSection) -> Die:
    """Call it to run `act_and_die`; answers the exit code."""

    def run(action: str, folder: Path, step: int, die_at: int | None) -> int:
        arguments = (action, section.model_dump(), CREDENTIALS, str(folder), step, die_at)
        process = processes.Process(target=act_and_die, args=arguments)
        process.start()
        process.join(60)
        assert process.exitcode is not None
        return process.exitcode

    return run


def test_a_publisher_that_is_killed_leaves_a_version_or_none_and_nothing_in_the_way(
    store: ObjectStore, die: Die, tmp_path: Path
) -> None:
    chain = Chain(store, tmp_path / "models", 1)
    chain.files(version(1), tensors_of(1))
    num_places = die("publish", chain.folder, 1, None)
    assert num_places >= 6
    chain.extend(1)
    for place in range(num_places):
        step = place + 2
        chain.files(version(step), tensors_of(step))
        assert die("publish", chain.folder, step, place) == -signal.SIGKILL
        is_there = chain.versions.exists(version(step))
        assert is_there == (place == num_places - 1)
        # by turns as it was and whole: how it is stored is not content
        manifest = chain.publish(step, base=chain.local[-1] if place % 2 == 0 else None)
        assert manifest.is_full == (place % 2 == 1 and not is_there)
        got = chain.versions.download_tensors(version(step), tmp_path / str(step), held=chain.local[:-1])
        assert got.num_failed_routes == 0
    assert len(chain.versions.versions()) == num_places + 2


def test_a_killed_download_leaves_nothing_by_half_or_in_the_way(store: ObjectStore, die: Die, tmp_path: Path) -> None:
    chain = Chain(store, tmp_path / "models", 3)
    expected = chain.versions.download_tensors(version(2), tmp_path / "expected").paths[0].read_bytes()
    num_places = die("download", tmp_path / "whole", 2, None)
    assert num_places > 10
    folder = tmp_path / "got"
    # each place is one on both stores: of the slower one some are enough
    places = range(num_places) if isinstance(store, FileStore) else range(2, num_places, 5)
    for place in places:
        assert die("download", folder, 2, place) == -signal.SIGKILL
        files = [path for path in folder.glob("[!.]*") if path.is_file()]
        assert [path.read_bytes() for path in files] == [expected] * (place == num_places - 1)
    (folder / "model.safetensors").unlink(missing_ok=True)
    got = chain.versions.download_tensors(version(2), folder)
    assert got.paths[0].read_bytes() == expected


@pytest.mark.parametrize("is_same", [True, False], ids=["equal-content", "other-content"])
def test_of_two_processes_that_publish_one_version_the_first_decides(
    processes: ForkServerContext, section: StoreSection, store: ObjectStore, tmp_path: Path, is_same: bool
) -> None:
    """One of them stores a delta, the other one the version whole."""
    chain = Chain(store, tmp_path / "models", 1)
    chain.files(version(1), tensors_of(1))
    mine, files = chain.files("mine", tensors_of(1 if is_same else 5))
    arguments = ("publish", section.model_dump(), CREDENTIALS, str(chain.folder), 1, None)
    other = processes.Process(target=act_and_die, args=arguments)
    other.start()
    result: Manifest | ObjectExistsError
    # a different moment of the other one in each of the cases
    time.sleep(0.1 * is_same)
    try:
        result = publish(chain.versions, 1, mine, files, None)
    except ObjectExistsError as error:
        result = error
    other.join(60)
    found = chain.versions.manifest(version(1))
    if is_same:
        assert result == found
        assert other.exitcode not in (None, 1)
    else:
        has_won = isinstance(result, Manifest)
        assert (other.exitcode == 1) == has_won, "exactly one of them is refused"
        assert found.is_full == has_won
        assert "exists with other content" in str(result) or has_won
    got = load_file(chain.versions.download_tensors(version(1), tmp_path / "got", held=chain.local).paths[0])
    expected = tensors_of(5 if not is_same and found.is_full else 1)
    assert all(got[name].tobytes() == expected[name].tobytes() for name in expected | got)
