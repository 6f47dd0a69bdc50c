"""The digest over parameters: the same for a file and for loaded tensors, in any order, with any metadata or dtype."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tba.errors import MalformedError, StoreError
from tba.weights import params_sha256, params_sha256_of_files
from tba.weights.digest import in_parallel

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def digest_of_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """Compute the digest that a searcher computes over the parameters that its engine holds."""
    bits = {name: t.contiguous().reshape(-1).view(torch.uint8).numpy() for name, t in tensors.items()}
    return params_sha256({name: (NAMES[t.dtype], tuple(t.shape), bits[name]) for name, t in tensors.items()})


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.z": torch.randn(7, 3, generator=generator),
        "model.a": torch.randn(5, generator=generator).to(torch.bfloat16),
        "lm_head": torch.randn(2, 2, generator=generator).to(torch.float16),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
    }


def test_the_file_digest_equals_the_digest_of_the_loaded_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    assert params_sha256_of_files([path]) == digest_of_tensors(load_file(path))


def test_order_and_metadata_do_not_matter(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a")
    save_file(dict(reversed(tensors().items())), tmp_path / "b", metadata={"x": "y"})
    assert params_sha256_of_files([tmp_path / "a"]) == params_sha256_of_files([tmp_path / "b"])


@pytest.mark.parametrize("change", ["value", "name", "shape", "dtype", "missing"])
def test_every_change_of_a_parameter_changes_the_digest(tmp_path: Path, change: str) -> None:
    changed = tensors()
    match change:
        case "value":
            changed["model.z"][0, 0] = torch.nextafter(changed["model.z"][0, 0], torch.tensor(9.0))
        case "name":
            changed["model.y"] = changed.pop("model.z")
        case "shape":
            changed["model.z"] = changed["model.z"].reshape(3, 7)
        case "dtype":
            changed["model.a"] = changed["model.a"].view(torch.float16)
        case "missing":
            del changed["empty"]
    save_file(tensors(), tmp_path / "a")
    save_file(changed, tmp_path / "b")
    assert params_sha256_of_files([tmp_path / "a"]) != params_sha256_of_files([tmp_path / "b"])


def test_the_digests_are_the_ones_that_were_published_before() -> None:
    tensors = {"w": ("F32", (2, 1), np.array([1.0, -2.0], "<f4").view(np.uint8))}
    assert params_sha256(tensors) == "1d7a5bbe83eaa27f51ac0df61a63dedc697e2c48fe421c6b4ce3296426dc1123"


def test_a_truncated_or_missing_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MalformedError, match="is not a whole safetensors file"):
        params_sha256_of_files([path])
    with pytest.raises(StoreError, match="cannot be read"):
        params_sha256_of_files([tmp_path / "nothing"])


@pytest.mark.parametrize(("size_bytes", "in_this_thread"), [(2**19, True), (2**30, False)])
def test_few_bytes_are_hashed_without_threads(size_bytes: int, in_this_thread: bool) -> None:
    def work(item: int) -> tuple[int, bool]:
        return item, threading.current_thread() is threading.main_thread()

    def fail(item: int) -> None:
        raise MalformedError(f"item {item}")

    found = in_parallel(work, range(3), size_bytes=size_bytes)
    assert found == [(item, in_this_thread) for item in range(3)]
    with pytest.raises(MalformedError, match="item 0"):
        in_parallel(fail, range(3), size_bytes=size_bytes)
