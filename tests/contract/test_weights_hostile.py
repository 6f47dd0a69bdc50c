"""Manifests and deltas from a stranger: refused in a moment, in little memory, and nothing is left of them."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from safetensors.numpy import load_file, save_file

from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import NodeCache, WeightVersions
from tba.weights.delta import DENSE, SPARSE, WHOLE
from tba.weights.digest import digest_of_file
from tba.wire.weight_manifest import MAX_DELTAS, Delta, Manifest, decode_manifest, encode_manifest, table_sha256
from tests.support.weight_chain import RUN, Chain, version

Document = dict[str, Any]
A_MOMENT_S = 5.0
"""Of computing; a second on a machine of its own."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """1-0 is full, 1-1 and 1-2 are deltas."""
    folder = tmp_path_factory.mktemp("hostile")
    return Chain(FileStore(folder / "store"), folder / "models", 3)


def with_table(document: Document) -> Document:
    """Correct the digest of the table, as a stranger would."""
    rows = ((each["name"], each["dtype"], each["shape"], each["digest"]) for each in document["tensors"])
    return document | {"params_sha256": table_sha256(rows)}


def tensor(document: Document, **changes: Any) -> Document:
    """Change the first tensor."""
    return with_table(document | {"tensors": [document["tensors"][0] | changes, *document["tensors"][1:]]})


def delta(document: Document, **changes: Any) -> Document:
    return document | {"delta": document["delta"] | changes}


def delta_object(document: Document, **changes: Any) -> Document:
    return delta(document, objects=[document["delta"]["objects"][0] | changes])


def stored_file(document: Document, **changes: Any) -> Document:
    return document | {"files": [document["files"][0] | changes]}


HOSTILE: dict[str, tuple[Callable[[Document], Any], str]] = {
    "older schema": (lambda d: d | {"schema": 0}, "schema"),
    "newer schema": (lambda d: d | {"schema": 3}, "schema"),
    "schema as text": (lambda d: d | {"schema": "2"}, "schema"),
    "unknown field": (lambda d: d | {"extra": 1}, "extra"),
    "many fields": (lambda d: d | {"canary": dict.fromkeys(map(str, range(99)))}, "an object with 99 fields"),
    "no version": (lambda d: d | {"version": "../1"}, "LINEAGE-STEP"),
    "tensor outside": (lambda d: tensor(d, file="../model.safetensors"), "file"),
    "absolute file": (lambda d: tensor(d, file="/etc/passwd"), "file"),
    "hidden file": (lambda d: tensor(d, file=".full-model.safetensors"), "file"),
    "long file": (lambda d: tensor(d, file="m" * 250), "file"),
    "file of the config": (lambda d: tensor(d, file="config.json"), "config"),
    "object outside": (lambda d: delta_object(d, name="../delta"), "name"),
    "config outside": (lambda d: stored_file(d, name="/tmp/config.json"), "name"),
    "two objects of a name": (lambda d: stored_file(d, name=d["delta"]["objects"][0]["name"]), "same name"),
    "key with dots": (lambda d: delta_object(d, key=f"runs/{RUN}/../secret"), "not allowed"),
    "key from the root": (lambda d: delta_object(d, key=f"/runs/{RUN}/weights"), "not below"),
    "key with a hole": (lambda d: delta_object(d, key=f"runs/{RUN}//weights"), "not allowed"),
    "key with a space": (lambda d: stored_file(d, key=f"runs/{RUN}/a b"), "not allowed"),
    "key with a newline": (lambda d: stored_file(d, key=f"runs/{RUN}/a\n"), "not allowed"),
    "key of another run": (lambda d: stored_file(d, key=f"runs/{RUN}x/weights/1-1/model.safetensors"), "not below"),
    "long key": (lambda d: stored_file(d, key=f"runs/{RUN}/{'a' * 2000}"), "at most 1024"),
    "negative shape": (lambda d: tensor(d, shape=[-1]), "greater than or equal to 0"),
    "petabytes": (lambda d: tensor(d, shape=[2**39, 2**39]), "has more than"),
    "overflowing shape": (lambda d: tensor(d, shape=[2**64]), "less than"),
    "shape of many": (lambda d: tensor(d, shape=[1] * 9), "at most 8"),
    "fractional shape": (lambda d: tensor(d, shape=[1.5]), "integer"),
    "digest of no form": (lambda d: tensor(d, digest="x"), "digest"),
    "dtype of no version": (lambda d: d | {"dtype": "int8"}, "dtype"),
    "unknown dtype": (lambda d: tensor(d, dtype="F4"), "unknown dtype"),
    "tensor twice": (lambda d: with_table(d | {"tensors": d["tensors"] * 2}), "same name"),
    "wrong table": (lambda d: d | {"params_sha256": "0" * 64}, "not the sha256 of the table"),
    "base is itself": (lambda d: delta(d, base=d["version"]), "not older"),
    "base is newer": (lambda d: delta(d, base="2-0"), "not older"),
    "base is a path": (lambda d: delta(d, base="../0"), "LINEAGE-STEP"),
    "chain of none": (lambda d: delta(d, num_to_full=0), "greater than or equal to 1"),
    "long chain": (lambda d: delta(d, num_to_full=10_000), "less than or equal to 256"),
    "stored nowhere": (lambda d: d | {"delta": None}, "neither"),
    "negative size": (lambda d: delta_object(d, size_bytes=-1), "greater"),
    "not an object": (lambda d: [d], "dictionary"),
    "a number": (lambda d: 7, "dictionary"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(chain: Chain, what: str) -> None:
    change, reason = HOSTILE[what]
    document = json.loads(encode_manifest(chain.local[1].manifest))
    with pytest.raises(MalformedError, match=f"weight manifest: .*{reason}"):
        decode_manifest(json.dumps(change(document)).encode())


class Endless(WeightVersions):
    """Every version is a delta against the one before, and says that a full one is near."""

    num_read = 0

    def manifest(self, version: PolicyVersion) -> Manifest:
        self.num_read += 1
        assert isinstance(self.template.delta, Delta)
        base = self.template.delta.model_copy(update={"base": f"1-{version.step - 1}"})
        return self.template.model_copy(update={"version": str(version), "delta": base})

    template: Manifest


def test_a_chain_of_ten_thousand_is_not_followed(chain: Chain, tmp_path: Path) -> None:
    versions = Endless(chain.store, RUN)
    versions.template = chain.local[1].manifest
    with pytest.raises(ObjectNotFoundError, match="no full version is left"):
        versions.download_tensors(version(10_000), tmp_path / "got")
    with pytest.raises(MalformedError, match=f"needs more than {MAX_DELTAS} deltas"):
        versions.bases(version(20_000))
    assert versions.num_read <= 2 * MAX_DELTAS + 3


def test_what_a_version_that_cannot_be_read_may_need_is_kept(tmp_path: Path) -> None:
    chain = Chain(FileStore(tmp_path / "store"), tmp_path / "models", 3)
    key = f"runs/{RUN}/weights/{version(2)}/manifest.json"
    newer = json.dumps(json.loads(chain.store.get(key)) | {"schema": 3}).encode()
    for document in (newer, b"{}"):
        chain.store.put(key, document)
        versions = WeightVersions(chain.store, RUN)
        assert versions.needed_by([version(1)]) == {version(0), version(1)}
        assert versions.needed_by([version(2)]) == {version(0), version(1), version(2)}


@pytest.mark.parametrize("cached", [False, True])
def test_a_full_file_with_a_dtype_of_no_manifest_is_damaged(tmp_path: Path, cached: bool) -> None:
    store = FileStore(tmp_path / "store")
    mine = Chain(store, tmp_path / "models", 1)
    if cached:
        cache = NodeCache(tmp_path / "cache", max_bytes=2**30)
        WeightVersions(store, RUN, cache=cache).download_tensors(version(0), tmp_path / "first")
        [path] = (tmp_path / "cache").glob("tensors-*")
    else:
        cache, path = None, tmp_path / "store" / mine.local[0].manifest.full[0].key
    data = path.read_bytes()
    damaged = data.replace(b'"F32","shape":[64,33]', b'"C64","shape":[32,33]')
    assert damaged != data
    path.write_bytes(damaged)
    versions = WeightVersions(store, RUN, cache=cache)
    if cached:  # made again
        assert versions.download_tensors(version(0), tmp_path / "got").route == "full"
    else:
        with pytest.raises(DigestError, match="unknown dtype 'C64'"):
            versions.download_tensors(version(0), tmp_path / "got")


def stream(data: bytes) -> bytes:
    frame = zstandard.compress(data, 1)
    return len(frame).to_bytes(4, "little") + frame


def bomb() -> bytes:
    """128 megabytes of zeros in some kilobytes."""
    return stream(bytes(1 << 27))


def file_of(path: Path, entries: dict[str, bytes]) -> None:
    save_file({name: np.frombuffer(data, np.uint8) for name, data in entries.items()}, path)


def raw_header(path: Path, header: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


DELTAS: dict[str, Callable[[Path], object]] = {
    "a tensor that is not in the table": lambda path: file_of(path, {"secret": b"\0"}),
    "a tensor for a megabyte of zeros": lambda path: file_of(path, {"weights": bytes(1 << 20)}),
    "bomb of gaps": lambda path: file_of(path, {"weights": bytes([SPARSE]) + bomb() + stream(b"\0") * 4}),
    "bomb of steps": lambda path: file_of(path, {"weights": bytes([SPARSE]) + stream(b"\0") + bomb() * 4}),
    "bomb of dense steps": lambda path: file_of(path, {"weights": bytes([DENSE]) + bomb() * 4}),
    "bomb as a whole": lambda path: file_of(path, {"weights": bytes([WHOLE]) + stream(bytes(64 * 33)) * 3 + bomb()}),
    "no safetensors file": lambda path: path.write_bytes(b"\xff" * 100),
    "a header of exabytes": lambda path: path.write_bytes(b"\xff" * 7 + b"\x0f" + bytes(100)),
    "a deep header": lambda path: raw_header(path, b'{"a":' * 100_000),
    "entries outside the file": lambda path: raw_header(
        path, b'{"weights":{"dtype":"U8","shape":[9999],"data_offsets":[0,9999]}}'
    ),
    "entries over each other": lambda path: raw_header(
        path,
        b'{"weights":{"dtype":"U8","shape":[64],"data_offsets":[0,64]},'
        b'"half":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}',
    ),
}


def publish_hostile(chain: Chain, path: Path, **changes: Any) -> WeightVersions:
    """Put a file in the place of the delta of 1-1, its digest and size in the manifest, of which more may change."""
    manifest = chain.local[1].manifest
    assert manifest.delta is not None
    key = f"runs/{RUN}/weights/1-1/hostile-{digest_of_file(path)}"
    chain.store.put_file(key, path)
    usual = {"key": key, "digest": digest_of_file(path), "size_bytes": path.stat().st_size}
    stored = manifest.delta.objects[0].model_copy(update=usual | changes.pop("stored", {}))
    changes = {"delta": manifest.delta.model_copy(update={"objects": [stored]}), **changes}
    document = encode_manifest(manifest.model_copy(update=changes))
    decode_manifest(document)  # only its content is wrong
    chain.store.put(f"runs/{RUN}/weights/1-1/manifest.json", document)
    return WeightVersions(chain.store, RUN)


def check_refused(
    versions: WeightVersions, folder: Path, held: list[Any], error: type[Exception], match: str | None = None
) -> None:
    """Refused in a moment with little memory, and nothing is left."""
    start_s = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match):
            versions.download_tensors(version(1), folder / "got", held=held)
        assert tracemalloc.get_traced_memory()[1] < 32e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - start_s < A_MOMENT_S
    assert list((folder / "got").iterdir()) == []


@pytest.mark.parametrize("what", DELTAS)
def test_a_hostile_delta_is_refused(chain: Chain, tmp_path: Path, what: str) -> None:
    DELTAS[what](tmp_path / "delta")
    versions = publish_hostile(chain, tmp_path / "delta")
    check_refused(versions, tmp_path, chain.local[:1], MalformedError)
    assert load_file(chain.local[0].paths[0]).keys() == {"weights", "half", "constant"}


def test_sizes_that_no_delta_can_have_are_refused_before_room_is_made(chain: Chain, tmp_path: Path) -> None:
    manifest = chain.local[1].manifest
    file_of(tmp_path / "delta", {"weights": bytes([WHOLE]) + stream(bytes(9)) * 4})
    for shape in ([2**39], [2**40 - 1]):
        for name, reason in (("weights", "cannot hold tensor 'weights'"), ("constant", "lacks the tensor 'constant'")):
            changes = {name: {"shape": shape}}
            tensors = [each.model_copy(update=changes.get(each.name)) for each in manifest.tensors]
            digest = table_sha256((each.name, each.dtype, each.shape, each.digest) for each in tensors)
            versions = publish_hostile(chain, tmp_path / "delta", tensors=tensors, params_sha256=digest)
            check_refused(versions, tmp_path, chain.local[:1], MalformedError, reason)


def test_an_object_larger_than_the_manifest_says_is_not_read(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "delta").write_bytes(bytes(5000))
    versions = publish_hostile(chain, tmp_path / "delta", stored={"size_bytes": 100})
    get_file = chain.store.get_file
    monkeypatch.setattr(
        chain.store,
        "get_file",
        lambda key, path, **options: pytest.fail(key) if "hostile" in key else get_file(key, path, **options),
    )
    check_refused(versions, tmp_path, chain.local[:1], DigestError, "is damaged: 5000 bytes, the manifest says 100")
