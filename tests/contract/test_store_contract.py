"""The contract of every object store, checked on the embedded store and on a real S3 server over the network."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tba.errors import DigestError, ObjectExistsError, ObjectNotFoundError, StoreError
from tba.store import ObjectStore

BAD_KEYS = ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", "a/.hidden", "a b", "a\nb", "a\n", "ä", "a\\b"]
BAD_KEYS.append("x" * 901)


def test_what_was_put_last_is_what_is_read(store: ObjectStore) -> None:
    for data in (b"\x00\xffold and longer", b"new", b""):
        store.put("runs/a/x.bin", data)
        assert (store.get("runs/a/x.bin"), store.size_bytes("runs/a/x.bin")) == (data, len(data))


def test_create_only_is_refused_when_the_key_is_taken_and_the_object_stays(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"second")
    store.put("a/b", b"first", create_only=True)
    with pytest.raises(ObjectExistsError, match="a/b"):
        store.put("a/b", b"second", create_only=True)
    with pytest.raises(ObjectExistsError, match="a/b"):
        store.put_file("a/b", source, create_only=True)
    assert store.get("a/b") == b"first"
    store.put_file("f", source, create_only=True)
    assert store.get("f") == b"second"


def test_of_many_concurrent_creators_exactly_one_wins(store: ObjectStore) -> None:
    start = threading.Barrier(6)

    def has_created(number: int) -> bool:
        start.wait()
        try:
            store.put("race", b"%d" % number, create_only=True)
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(has_created, range(6)))
    assert (found.count(True), found.count(False), store.get("race")) == (1, 5, b"%d" % found.index(True))


def test_files_go_in_and_out_unchanged(store: ObjectStore, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.write_bytes(os.urandom(3_000_001))
    store.put_file("files/big", source)
    store.get_file("files/big", target)
    assert (target.read_bytes(), store.size_bytes("files/big")) == (source.read_bytes(), 3_000_001)
    store.get_file("files/big", target, max_bytes=3_000_001)
    with pytest.raises(DigestError, match=r"files/big in .* is damaged: 3000001 bytes, and no more than 3000000 are"):
        store.get_file("files/big", target, max_bytes=3_000_000)
    store.put("files/empty", b"")
    store.get_file("files/empty", target)
    assert target.read_bytes() == b""
    assert [path.name for path in target.parent.iterdir()] == ["target"], "no temporary file is left"


def test_a_missing_object_is_an_error_that_names_it(store: ObjectStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(ObjectNotFoundError, match=r"no/such\.thing"):
        store.get("no/such.thing")
    with pytest.raises(ObjectNotFoundError, match=r"no/such\.thing"):
        store.get_file("no/such.thing", target)
    assert not target.exists()
    assert store.size_bytes("no/such.thing") is None


def test_a_folder_is_not_an_object_and_deleting_is_idempotent(store: ObjectStore) -> None:
    store.put("a/b/c", b"1")
    assert store.size_bytes("a/b") is None
    with pytest.raises(ObjectNotFoundError):
        store.get("a/b")
    with pytest.raises(ObjectNotFoundError):
        store.get("a/b/c/d")
    for missing in ("a/b", "a/b/c/d", "never/was"):
        store.delete(missing)
    assert store.list("") == ["a/b/c"]
    for _ in range(2):
        store.delete("a/b/c")
    assert (store.size_bytes("a/b/c"), store.list("")) == (None, [])


def test_a_missing_source_file_is_not_taken_for_a_missing_object(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere cannot be stored") as caught:
        store.put_file("a", tmp_path / "nowhere")
    assert not isinstance(caught.value, ObjectNotFoundError)


def test_list_is_sorted_and_takes_any_text_prefix(store: ObjectStore) -> None:
    for key in ["w/1-10/m", "w/1-9/m", "w/1-9/t", "v", "wx/a"]:
        store.put(key, b"x")
    assert store.list("") == ["v", "w/1-10/m", "w/1-9/m", "w/1-9/t", "wx/a"]
    assert store.list("w/") == ["w/1-10/m", "w/1-9/m", "w/1-9/t"]
    assert store.list("w") == ["w/1-10/m", "w/1-9/m", "w/1-9/t", "wx/a"]
    assert store.list("w/1-1") == ["w/1-10/m"]
    assert store.list("nothing/") == []


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_could_leave_the_store_are_refused_everywhere(store: ObjectStore, key: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    for call in (
        lambda: store.put(key, b"x"),
        lambda: store.put_file(key, source),
        lambda: store.get(key),
        lambda: store.get_file(key, tmp_path / "target"),
        lambda: store.size_bytes(key),
        lambda: store.delete(key),
        lambda: store.list(key + "//"),
    ):
        with pytest.raises(StoreError, match="is not allowed"):
            call()
    assert source.read_bytes() == b"x"


def test_a_usable_store_passes_its_check_and_keeps_nothing_of_it(store: ObjectStore) -> None:
    store.check()
    store.check(write=True)
    assert store.list("") == []


def test_making_the_place_of_the_objects_again_changes_nothing(store: ObjectStore) -> None:
    store.put("a", b"1")
    store.create_bucket()
    assert store.get("a") == b"1"
    store.check(write=True)
