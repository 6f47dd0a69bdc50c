"""Faults of weight deltas in both stores: damage, gaps, wrong bases, a store that is away, a full disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from safetensors.numpy import load_file, save_file

from tba.errors import DigestError, MalformedError, ObjectNotFoundError, StoreUnavailableError
from tba.store import ObjectStore
from tba.weights import DeltaSettings, LocalVersion, NodeCache, WeightVersions, publishing
from tba.weights.digest import digest_of_file
from tba.wire.weight_manifest import Manifest, encode_manifest
from tests.support.weight_chain import RUN, Chain, flip, publish, tensors_of, version

EVERY_OTHER_FULL = DeltaSettings(keyframe_interval=2, max_share=10.0)


@pytest.fixture
def chain(store: ObjectStore, tmp_path: Path) -> Chain:
    """1-0 is full, 1-1 a delta, 1-2 both, 1-3 a delta."""
    chain = Chain(store, tmp_path / "models")
    chain.extend(4, deltas=EVERY_OTHER_FULL)
    assert [each.manifest.is_full for each in chain.local] == [True, False, True, False]
    return chain


def delta_key(chain: Chain, step: int) -> str:
    delta = chain.local[step].manifest.delta
    assert delta is not None
    return delta.objects[0].key


def replace(chain: Chain, manifest: Manifest) -> None:
    """Put a manifest where a valid one was."""
    chain.store.put(f"runs/{RUN}/weights/{manifest.version}/manifest.json", encode_manifest(manifest))
    chain.versions = WeightVersions(chain.store, RUN)


def check_tensors(local: LocalVersion, step: int) -> None:
    found, expected = load_file(local.paths[0]), tensors_of(step)
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


DAMAGE: dict[str, Callable[[ObjectStore, str, str], object]] = {
    "truncated": lambda store, key, other: store.put(key, store.get(key)[:-1]),
    "a bit": lambda store, key, other: flip(store, key),
    "another": lambda store, key, other: store.put(key, store.get(other)),
    "removed": lambda store, key, other: store.delete(key),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_delta_falls_back_to_a_full_version_or_is_named(chain: Chain, tmp_path: Path, how: str) -> None:
    whole = chain.versions.download_tensors(version(2), tmp_path / "a", held=chain.local[:2])
    assert (whole.route, whole.num_failed_routes) == ("delta", 0)
    DAMAGE[how](chain.store, delta_key(chain, 2), delta_key(chain, 1))
    got = chain.versions.download_tensors(version(2), tmp_path / "b", held=chain.local[:2])
    assert (got.route, got.num_failed_routes) == ("full", 2)
    check_tensors(got, 2)
    DAMAGE[how](chain.store, delta_key(chain, 3), delta_key(chain, 1))
    (folder := tmp_path / "c").mkdir()
    (folder / "model.safetensors").write_bytes(b"old")
    with pytest.raises((DigestError, ObjectNotFoundError), match=f"{delta_key(chain, 2)}|{delta_key(chain, 3)}"):
        chain.versions.download_tensors(version(3), folder, held=chain.local[:2])
    assert chain.versions.counts["routes_failed"] > 2, "those of the download that failed as well"
    assert [path.read_bytes() for path in folder.iterdir()] == [b"old"]
    chain.extend(1, deltas=EVERY_OTHER_FULL)  # the next full version repairs it
    check_tensors(chain.versions.download_tensors(version(4), folder, held=chain.local[:2]), 4)


def test_entries_under_other_names_are_found_by_the_digests_of_tensors(chain: Chain, tmp_path: Path) -> None:
    """Whoever changes the delta changes its digest in the manifest as well."""
    manifest = chain.local[2].manifest
    assert manifest.delta is not None
    stored = manifest.delta.objects[0]
    chain.store.get_file(stored.key, tmp_path / "delta")
    entries = load_file(tmp_path / "delta")
    assert len(entries) == 3
    swapped = dict(zip(sorted(entries), [entries[name] for name in sorted(entries, reverse=True)], strict=True))
    save_file(swapped, tmp_path / "delta")
    chain.store.put_file(stored.key, tmp_path / "delta")
    changes = {"digest": digest_of_file(tmp_path / "delta"), "size_bytes": (tmp_path / "delta").stat().st_size}
    changed = stored.model_copy(update=changes)
    replace(chain, manifest.model_copy(update={"delta": manifest.delta.model_copy(update={"objects": [changed]})}))
    got = chain.versions.download_tensors(version(2), tmp_path / "got", held=[chain.local[1]])
    assert (got.route, got.num_failed_routes) == ("full", 1)
    check_tensors(got, 2)


def test_files_that_are_here_in_part_are_never_written_to(chain: Chain, tmp_path: Path) -> None:
    path = chain.local[2].paths[0]
    torn = LocalVersion(version(2), (path, path.with_name("gone.safetensors")), chain.local[2].manifest)
    before = path.stat()
    got = chain.versions.download_tensors(version(2), tmp_path / "got", held=[torn, chain.local[1]])
    assert (got.route, got.num_failed_routes) == ("delta", 1)
    check_tensors(got, 2)
    # a version is assembled in place: in a file that had two names, under an engine that reads the other one
    assert not got.paths[0].samefile(path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("fault", ["other bytes", "cut", "deleted", "other tensors"])
def test_files_here_that_are_not_what_they_were_cost_a_fall_back(chain: Chain, tmp_path: Path, fault: str) -> None:
    mine = chain.versions.download_tensors(version(1), tmp_path / "mine")
    path = mine.paths[0]
    match fault:
        case "other bytes":
            data = path.read_bytes()
            path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "deleted":
            path.unlink()
        case "other tensors":
            shutil.copyfile(chain.local[3].paths[0], path)
    for step in (1, 2):
        got = chain.versions.download_tensors(version(step), tmp_path / str(step), held=[mine])
        assert (got.route, got.num_failed_routes) == ("full", 1)
        check_tensors(got, step)
    # nobody could use a delta against such files
    manifest = chain.publish(9, base=mine)
    assert (manifest.is_full, manifest.delta) == (True, None)
    check_tensors(chain.versions.download_tensors(version(9), tmp_path / "9", held=chain.local[:4]), 9)


def test_a_delta_to_a_version_that_is_here_reads_no_other_manifest(store: ObjectStore, tmp_path: Path) -> None:
    """A manifest of a large model has megabytes."""
    chain = Chain(store, tmp_path / "models", 6)
    read, get = list[str](), store.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "get", lambda key: read.append(key) or get(key))
        got = WeightVersions(store, RUN).download_tensors(version(5), tmp_path / "got", held=[chain.local[4]])
    assert got.route == "delta"
    assert read == [f"runs/{RUN}/weights/1-5/manifest.json"]


def test_a_base_of_another_run_is_none(chain: Chain, store: ObjectStore) -> None:
    path, files = chain.files("other", tensors_of(5))
    manifest = publish(WeightVersions(store, "other"), 5, path, files, chain.local[3])
    assert (manifest.is_full, manifest.delta) == (True, None)


def test_a_gap_in_the_chain_is_named_and_routes_without_it_are_used(store: ObjectStore, tmp_path: Path) -> None:
    chain = Chain(store, tmp_path / "models", 4)
    manifest_key = f"runs/{RUN}/weights/1-1/manifest.json"
    document = store.get(manifest_key)
    for damage, error in (
        (None, ObjectNotFoundError),
        (b"{", MalformedError),
        (document.replace(b'"schema":2', b'"schema":3'), MalformedError),
    ):
        store.delete(manifest_key) if damage is None else store.put(manifest_key, damage)
        versions = WeightVersions(store, RUN)
        for step in (2, 3):
            with pytest.raises(error, match=rf"weight version 1-{step} .*no full version is left .*\(w.*newer version"):
                versions.download_tensors(version(step), tmp_path / "none", held=[chain.local[0]])
            assert list((tmp_path / "none").iterdir()) == []
        got = versions.download_tensors(version(3), tmp_path / "got", held=[chain.local[0], chain.local[2]])
        assert (got.route, got.num_failed_routes) == ("delta", 0)
        got = versions.download_tensors(version(3), tmp_path / "got", held=[chain.local[1]])
        check_tensors(got, 3)
    store.put(manifest_key, document)
    store.delete(f"runs/{RUN}/weights/1-0/model.safetensors")
    with pytest.raises(ObjectNotFoundError, match=r"1-0/model\.safetensors .*does not exist"):
        WeightVersions(store, RUN).download_tensors(version(3), tmp_path / "none")


class Away:
    """A store that fails after `num_left` more calls."""

    def __init__(self, store: ObjectStore, num_left: int) -> None:
        self._store, self.num_left = store, num_left
        self.url = store.url

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.num_left -= 1
            if self.num_left < 0:
                raise StoreUnavailableError("the store is away")
            return getattr(self._store, name)(*args, **options)

        return call


def test_a_store_that_is_away_at_any_moment_leaves_nothing_by_half(chain: Chain, tmp_path: Path) -> None:
    folder, num_failed = tmp_path / "got", 0
    path, files = chain.files("next", tensors_of(4))
    for first in range(100):
        versions = WeightVersions(cast(ObjectStore, Away(chain.store, first)), RUN)
        with suppress(StoreUnavailableError):
            check_tensors(versions.download_tensors(version(3), folder, held=[chain.local[1]]), 3)
            break
        num_failed += 1
        assert not folder.exists() or list(folder.iterdir()) == []
    assert 4 < num_failed < 99
    flaky = Away(chain.store, 0)
    versions = WeightVersions(cast(ObjectStore, flaky), RUN)
    for flaky.num_left in range(100):
        with suppress(StoreUnavailableError):
            publish(versions, 4, path, files, chain.local[3])
            break
        assert not chain.versions.exists(version(4))
    assert not list(path.parent.glob(".*"))
    check_tensors(chain.versions.download_tensors(version(4), tmp_path / "4", held=chain.local), 4)


def test_a_deletion_that_is_broken_off_leaves_no_version_by_half(store: ObjectStore, tmp_path: Path) -> None:
    chain = Chain(store, tmp_path / "models", 3)
    flaky = Away(store, 0)
    versions = WeightVersions(cast(ObjectStore, flaky), RUN)
    for flaky.num_left in range(100):
        with suppress(StoreUnavailableError):
            versions.delete(version(2))
            break
        if chain.versions.exists(version(2)):
            check_tensors(chain.versions.download_tensors(version(2), tmp_path / "got"), 2)
    assert flaky.num_left < 99
    # with the files that both share
    check_tensors(chain.versions.download_model(version(1), tmp_path / "got"), 1)
    # one that a killed trainer has begun to delete goes with the next lineage
    store.delete(f"runs/{RUN}/weights/1-1/manifest.json")
    assert chain.versions.delete_incomplete(before_lineage=2) == [version(1)]
    assert not store.list(f"runs/{RUN}/weights/1-1/")


def test_files_that_were_just_read_are_not_read_again_as_a_base(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    check = publishing.check_digests
    monkeypatch.setattr(publishing, "check_digests", lambda *args: made.append("check") or check(*args))
    versions, local = WeightVersions(chain.store, RUN), chain.local[3]
    for step in (4, 5):
        path, files = chain.files(step, tensors_of(step))
        manifest = publish(versions, step, path, files, local)
        assert manifest.delta is not None
        local = LocalVersion(version(step), (path,), manifest)
        assert made == ["check"], "the files of another process alone"
    save_file(tensors_of(3), local.paths[0])
    assert publish(versions, 6, *chain.files("6", tensors_of(6)), local).delta is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    (folder := tmp_path / "disk").mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no right to mount a small tmpfs (needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_named_and_the_old_files_stay(chain: Chain, small_disk: Path, tmp_path: Path) -> None:
    mine = chain.versions.download_tensors(version(1), small_disk / "mine")
    ballast, path = small_disk / "ballast", small_disk / "next" / "model.safetensors"
    path.parent.mkdir()
    shutil.copyfile(chain.local[3].paths[0], path)
    files = {"config.json": chain.folder / "1-3" / "config.json"}
    for held in ([mine], []):
        num_failed = 0
        for free_pages in range(20):
            ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - free_pages * 4096))
            if free_pages == 0 and held:  # a delta would need room; the version whole needs none
                assert publish(chain.versions, 7, path, files, mine).delta is None
            if free_pages < 3:
                with pytest.raises(StoreUnavailableError, match=rf"the disk of {small_disk}.* is full"):
                    chain.versions.download_tensors(version(2), small_disk / "got", held=held)
            with suppress(StoreUnavailableError):
                got = chain.versions.download_tensors(version(2), small_disk / "got", held=held)
                break
            num_failed += 1
            ballast.unlink()
            check_tensors(mine, 1)
        ballast.unlink()
        check_tensors(got, 2)
        assert got.num_failed_routes == 0
        shutil.rmtree(small_disk / "got")
        assert 3 <= num_failed < 19
    check_tensors(chain.versions.download_tensors(version(7), tmp_path / "7"), 3)


def test_a_full_disk_of_the_cache_of_a_machine_costs_the_cache_alone(chain: Chain, small_disk: Path) -> None:
    cache = NodeCache(small_disk / "cache", max_bytes=2**30)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    versions, folder = WeightVersions(chain.store, RUN, cache=cache), chain.folder.parent
    with structlog.testing.capture_logs() as lines:
        check_tensors(versions.download_tensors(version(2), folder / "full"), 2)
    reasons = [line["reason"] for line in lines if line["event"] == "weight_not_cached"]
    assert len(reasons) == versions.counts["not_cached"] > 0
    assert all(f"the disk of {small_disk}" in reason for reason in reasons)
    assert not [path for path in (small_disk / "cache").iterdir() if not path.name.startswith(".lock-")]
    ballast.unlink()
    for name, route in (("first", "full"), ("second", "cache")):
        assert versions.download_tensors(version(2), folder / name).route == route
