"""Tensors in files of bounded size, iterators that every process exhausts, and folders that killed processes leave."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from tba_trainer.checkpoints.weight_files import TensorFiles, lockstep, write_tensor_files

FLOAT_BYTES = 4


@given(st.lists(st.integers(0, 40), min_size=0, max_size=12), st.integers(1, 120))
def test_every_tensor_is_in_one_file_in_order_and_files_are_bounded(lengths: list[int], max_bytes: int) -> None:
    tensors = [(f"t{i}", torch.full((length,), float(i))) for i, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as name:
        paths = list(write_tensor_files(tensors, Path(name), stem="model", max_bytes=max_bytes))
        per_file = [load_file(path) for path in paths]
        assert [path.name for path in paths] == [f"model-{i:05d}.safetensors" for i in range(1, len(paths) + 1)]
        assert sorted(name for file in per_file for name in file) == sorted(name for name, _ in tensors)
        for file in per_file:
            num_bytes = FLOAT_BYTES * sum(tensor.numel() for tensor in file.values())
            assert num_bytes <= max_bytes or len([t for t in file.values() if t.numel()]) == 1
        found = TensorFiles(paths)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors)
        assert len(found) == len(tensors)


def test_a_file_may_be_deleted_before_the_next_one_is_written(tmp_path: Path) -> None:
    left = []
    for path in write_tensor_files(((f"t{i}", torch.zeros(10)) for i in range(5)), tmp_path, stem="x", max_bytes=40):
        left.append(len(list(tmp_path.iterdir())))
        path.unlink()
    assert left == [1] * 5


def test_a_consumer_that_fails_still_takes_its_part_in_every_exchange() -> None:
    made: list[int] = []

    def exchanges() -> Iterator[int]:
        for i in range(5):
            made.append(i)
            yield i

    def write() -> None:
        with closing(lockstep(exchanges())) as items:
            if next(items) == 0:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert made == [0, 1, 2, 3, 4]


def test_a_full_disk_is_an_os_error_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:  # the words of safetensors 0.8 on a full tmpfs
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("tba_trainer.checkpoints.weight_files.save_file", full)
    with pytest.raises(OSError, match="No space left on device") as info:
        list(write_tensor_files([("a", torch.zeros(3))], tmp_path, stem="model", max_bytes=100))
    assert (info.value.errno, info.value.filename) == (errno.ENOSPC, str(tmp_path / "model-00001.safetensors"))
