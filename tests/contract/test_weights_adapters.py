"""Versions that are LoRA adapters: merged to the same bits everywhere, fetched with their starting model once, refused
when they are damaged or hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tba.errors import DigestError, MalformedError, ObjectNotFoundError, TbaError
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, NodeCache, WeightVersions, adapter
from tba.weights.adapter import AdapterFile, LayerAdapter, merged_blocks, read_adapter
from tba.weights.digest import RawTensor
from tba.wire.weight_manifest import Adapter, DeltaObject, decode_manifest
from tests.support.weight_chain import publish_files

RANK, ALPHA = 3, 5
ROWS, COLUMNS = 24, 40
LAYER = "base_model.model.layer"
Tensors = dict[str, np.ndarray[Any, Any]]


def adapter_tensors(seed: int, *, rows: int = ROWS, columns: int = COLUMNS, rank: int = RANK) -> Tensors:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rank, columns), np.float32), rng.standard_normal((rows, rank), np.float32)
    a *= 10.0 ** rng.integers(-4, 1, a.shape)  # of many sizes, so that float sums would depend on their order
    return {f"{LAYER}.lora_A.weight": a.astype(np.float32), f"{LAYER}.lora_B.weight": b * np.float32(0.01)}


class Run:
    """A run whose versions 1-1, 1-2, ... are adapters for 0-0."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, FileStore(folder / "store")
        self.versions = WeightVersions(self.store, "demo")
        self.config = folder / "config.json"
        self.config.write_text("{}")
        rng = np.random.default_rng(0)
        rows = {"layer.weight": ROWS, "embedding.weight": 200}
        self.start = {name: rng.standard_normal((num, COLUMNS)).astype(np.float16) for name, num in rows.items()}
        save_file(self.start, folder / "model.safetensors")
        manifest = self._publish(START, [folder / "model.safetensors"], None)
        self.base = LocalVersion(START, (folder / "model.safetensors",), manifest)

    def publish(self, step: int, tensors: Tensors | None = None) -> PolicyVersion:
        path = self.folder / f"adapter-{step}.safetensors"
        save_file(adapter_tensors(step) if tensors is None else tensors, path)
        file = AdapterFile(path=path, rank=RANK, alpha=ALPHA, fan_in_fan_out=False)
        self._publish(PolicyVersion(1, step), file, self.base)
        return PolicyVersion(1, step)

    def _publish(self, version: PolicyVersion, what: Any, base: LocalVersion | None) -> Any:
        files = {"config.json": self.config}
        return publish_files(self.versions, version, what, files, parent=None, dtype="float16", base=base)

    def path_of(self, version: PolicyVersion, pattern: str) -> Path:
        (path,) = (self.folder / f"store/runs/demo/weights/{version}").glob(pattern)
        return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def as_floats(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "BF16":
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits.view({"F32": np.float32, "F16": np.float16}[dtype])


@pytest.mark.parametrize(("dtype", "transposed"), [("F32", False), ("BF16", True), ("F16", False)])
def test_merged_bits_depend_on_no_order_of_sums_and_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, transposed: bool
) -> None:
    """The exact sum is that of math.fsum; a BLAS that adds in another order, or in wider registers, gives the same."""
    rank = 37
    tensors = adapter_tensors(1, rank=rank)
    shape = (COLUMNS, ROWS) if transposed else (ROWS, COLUMNS)
    values = np.random.default_rng(2).standard_normal(shape, np.float32)
    values[0] = -0.0
    bits = {"F32": values, "BF16": (values.view(np.uint32) >> 16).astype(np.uint16), "F16": values.astype(np.float16)}
    raw: RawTensor = (dtype, shape, bits[dtype].reshape(-1).view(np.uint8))
    path = tmp_path / "adapter.safetensors"
    save_file(tensors, path)
    stored = DeltaObject(name=path.name, key="runs/demo/adapter.safetensors", size_bytes=9, digest="0" * 32)
    given = Adapter(base="0-0", rank=rank, alpha=ALPHA, fan_in_fan_out=transposed, stored=stored)
    layer = read_adapter(given, path, {"layer.weight": raw})["layer.weight"]
    merged = np.concatenate(list(merged_blocks(raw, layer)))

    exact = [[math.fsum(row * column) for column in layer.right.T] for row in layer.left]
    assert (layer.left @ layer.right).tolist() == exact
    order = np.random.default_rng(3).permutation(rank)
    for products in (1, 11 * rank * shape[1], 2**40):
        monkeypatch.setattr(adapter, "BLOCK_PRODUCTS", products)
        shuffled = LayerAdapter(layer.left[:, order], layer.right[order])
        assert np.array_equal(np.concatenate(list(merged_blocks(raw, shuffled))), merged)

    a, b = (tensors[f"{LAYER}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    product = ALPHA / rank * (b @ a)
    assert np.abs(layer.left @ layer.right - (product.T if transposed else product)).max() < 1e-6 * product.max()
    wanted = as_floats(bits[dtype], dtype) + (product.T if transposed else product)
    tolerance = {"F32": 2e-7, "BF16": 2**-8, "F16": 2**-11}[dtype]
    np.testing.assert_allclose(as_floats(merged, dtype).reshape(shape), wanted, rtol=tolerance, atol=1e-6)


def test_the_starting_model_is_downloaded_once_and_every_later_version_is_its_adapter(run: Run, tmp_path: Path) -> None:
    first, second = run.publish(1), run.publish(2)
    manifest = run.versions.manifest(second)
    assert not manifest.is_full
    assert (manifest.delta, run.versions.bases(second)) == (None, [START])
    assert run.versions.needed_by([second]) == {START, second}
    late = run.versions.download_tensors(first, tmp_path / "late", keeps_base=True)
    start_bytes = (tmp_path / "model.safetensors").stat().st_size
    sizes = {version: run.versions.manifest(version).adapter_bytes for version in (first, second)}
    assert (late.route, late.downloaded_bytes) == ("full", start_bytes + sizes[first])
    assert late.base is not None
    next_one = run.versions.download_tensors(second, tmp_path / "late-2", held=[late, late.base])
    assert (next_one.route, next_one.downloaded_bytes) == ("adapter", sizes[second])
    found = load_file(next_one.paths[0])
    assert np.array_equal(found["embedding.weight"], run.start["embedding.weight"])
    assert not np.array_equal(found["layer.weight"], run.start["layer.weight"])
    # a folder for people holds nothing else
    run.versions.download_model(second, tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


def test_the_searchers_of_a_machine_download_the_starting_model_and_each_adapter_once(run: Run, tmp_path: Path) -> None:
    first, second = run.publish(1), run.publish(2)
    cache = NodeCache(tmp_path / "cache", max_bytes=2**30)
    fetched: list[str] = []
    routes: list[tuple[str, int]] = []

    class Counting(FileStore):
        def get_file(self, key: str, path: Path, *, max_bytes: int | None = None) -> None:
            fetched.append(key.rpartition("/")[2].partition("-")[0])
            super().get_file(key, path, max_bytes=max_bytes)

    for searcher in range(2):
        versions = WeightVersions(Counting(tmp_path / "store"), "demo", cache=cache)
        for version in (first, second):  # each forgets what it held
            local = versions.download_tensors(version, tmp_path / f"searcher-{searcher}")
            routes.append((local.route, local.downloaded_bytes))
    sizes = [run.versions.manifest(version).adapter_bytes for version in (first, second)]
    start_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert routes == [("full", start_bytes + sizes[0]), ("adapter", sizes[1]), ("cache", 0), ("cache", 0)]
    assert sorted(fetched) == ["adapter", "adapter", "model.safetensors"]


def test_a_version_cannot_be_had_without_its_adapter_or_its_starting_model(run: Run, tmp_path: Path) -> None:
    version = run.publish(1)
    path = run.path_of(version, "adapter-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DigestError, match=r"adapter-.*is damaged"):
        run.versions.download_tensors(version, tmp_path / "out")
    path.unlink()
    with pytest.raises(ObjectNotFoundError, match="adapter-"):
        run.versions.download_tensors(version, tmp_path / "out", held=[run.base])
    path.write_bytes(data)
    # what is here is damaged: the store's is taken
    save_file({**run.start, "layer.weight": run.start["layer.weight"] * 2}, tmp_path / "wrong.safetensors")
    wrong = replace(run.base, paths=(tmp_path / "wrong.safetensors",))
    local = run.versions.download_tensors(version, tmp_path / "out", held=[wrong])
    assert (local.route, local.num_failed_routes) == ("full", 1)
    run.path_of(START, "manifest.json").unlink()
    sentence = r"the starting model that it is for cannot be had.*start the trainer"
    with pytest.raises(ObjectNotFoundError, match=sentence):
        WeightVersions(run.store, "demo").download_tensors(version, tmp_path / "none")
    run.base = wrong
    with pytest.raises(DigestError, match=r"layer\.weight' of weight version 0-0"):  # nobody could merge it
        run.publish(2)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "base that is newer": (lambda adapter: adapter.update(base="1-1"), "not older than version 1-1"),
    "key elsewhere": (lambda adapter: adapter["stored"].update(key="secrets/x"), "not below runs/demo/"),
    "path escape": (lambda adapter: adapter["stored"].update(key="runs/demo/../x"), "runs/demo/../x"),
    "rank of petabytes": (lambda adapter: adapter.update(rank=2**40), "less than or equal to 65536"),
    "factor": (lambda adapter: adapter.update(alpha=0), "greater than or equal to 1"),
    "other rank": (lambda adapter: adapter.update(rank=2), "at rank 2"),
    "other order": (lambda adapter: adapter.update(fan_in_fan_out=True), r"matrices \[24, 3\] and \[3, 40\]"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_manifest_of_an_adapter_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    version = run.publish(1)
    path = run.path_of(version, "manifest.json")
    document = json.loads(path.read_text())
    change, message = HOSTILE[name]
    change(document["adapter"])
    path.write_text(json.dumps(document))
    with pytest.raises(TbaError, match=message):
        run.versions.download_tensors(version, tmp_path / "out")


BAD: dict[str, tuple[Tensors, str]] = {
    "other columns": (adapter_tensors(1, columns=41), r"matrices \[24, 3\] and \[3, 41\] for 'layer.weight'"),
    "infinity": ({**adapter_tensors(1), f"{LAYER}.lora_A.weight": np.full((3, 40), np.inf, np.float32)}, "not finite"),
    "half": ({**adapter_tensors(1), f"{LAYER}.lora_A.weight": np.ones((3, 40), np.float16)}, "must be a matrix in F32"),
    "one matrix": ({f"{LAYER}.lora_A.weight": np.ones((3, 40), np.float32)}, r"lacks .*lora_B"),
    "unknown layer": (
        {key.replace("layer", "head"): value for key, value in adapter_tensors(1).items()},
        "no layer of the starting model",
    ),
    "other tensor": ({**adapter_tensors(1), "x": np.ones(1, np.float32)}, "no part of a LoRA adapter"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_an_adapter_that_does_not_fit_the_starting_model_is_never_published(run: Run, name: str) -> None:
    tensors, message = BAD[name]
    with pytest.raises(MalformedError, match=message):
        run.publish(1, tensors)
    assert run.versions.versions() == [START]


def test_a_version_is_stored_whole_or_by_a_way_that_the_manifest_names(run: Run) -> None:
    document = json.loads(run.path_of(run.publish(1), "manifest.json").read_text())
    with pytest.raises(MalformedError, match="neither whole, nor as a delta, nor as an adapter"):
        decode_manifest(json.dumps({**document, "adapter": None}).encode())
