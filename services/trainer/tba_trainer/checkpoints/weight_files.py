"""Weights as files: named tensors in safetensors files of bounded size, and snapshots of a version to publish.

    theta --WeightSnapshotWriter.take--> WeightSnapshot: tensors and canary of a version, between two steps
                                             --write--> tensor files, beside training

The tensors of a snapshot are in memory until they are in files, and those of one snapshot at most. Others are written
as they come and read one at a time: no more than one file's are in memory at once. The files lie in a temporary folder
until they are in the store.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tba.config import Recipe
from tba.versions import START, PolicyVersion
from tba.weights.adapter import AdapterFile
from tba.wire import Canary
from tba_trainer.checkpoints.canary import CanaryMaker
from tba_trainer.model.parameters import adapter_tensors, assign, has_adapter, has_transposed_weights, published_tensors
from tba_trainer.model.policy import TORCH_DTYPES, frozen_copy
from tba_trainer.model.sharding import rounds_weights

SUFFIX = ".safetensors"
_ONE_FILE = 2**62
"""Bytes of an adapter, which is one file: peft and vLLM know no other."""
Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True, eq=False)
class WeightSnapshot:
    """The weights of one version, to be published once they are in files."""

    version: PolicyVersion
    parent: PolicyVersion | None
    dtype: str
    folder: Path
    """Of its files alone."""
    canary: Canary
    paths: tuple[Path, ...] = ()
    """safetensors files with the named parameters in `dtype`, once `write` has returned; or the file of the adapter."""
    adapter: AdapterFile | None = None
    """What the version is, beside the starting model; None: it is `paths`."""
    held: list[tuple[str, Tensor]] = field(default_factory=list)
    """Named parameters in memory, not in a file yet."""
    max_file_bytes: int = _ONE_FILE
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self) -> None:
        """Write what is in memory to files, once; a second caller waits for the first.

        Raises:
            OSError: the local disk is full; all of it stays in memory.
        """
        with self._lock:
            if self.held:
                self.paths = tuple(write_model_files(self.held, self.folder, max_bytes=self.max_file_bytes))
                self.held = []

    @property
    def tensors(self) -> TensorFiles:
        """The named parameters, from files."""
        self.write()
        return TensorFiles(self.paths)

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


class WeightSnapshotWriter:
    """Takes snapshots of theta.

    Args:
        model: theta.
        recipe: says the dtype and the size of the files, and how exact searchers must be.
        folder: for the files of snapshots until they are published.
    """

    def __init__(self, model: Any, recipe: Recipe, *, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._dtype = recipe.model.dtype
        self._max_bytes = recipe.store.shard_bytes
        # the canary is computed from the published tensors in the published dtype: where theta differs (another dtype,
        # an adapter that is not merged, weights that are rounded for a pass), a second copy of the model holds them
        same = all(p.dtype == TORCH_DTYPES[self._dtype] for p in model.parameters())
        same = same and not has_adapter(model) and not rounds_weights(model)
        self._published = model if same else frozen_copy(model, TORCH_DTYPES[self._dtype])
        self._canary = CanaryMaker(model, self._published, recipe)
        lora = recipe.model.lora
        self._lora = lora if lora is not None and lora.publish == "adapter" else None
        self._is_transposed = self._lora is not None and has_transposed_weights(model)

    def take(self, version: PolicyVersion, parent: PolicyVersion | None) -> WeightSnapshot:
        """Copy the current weights to memory; those of an adapter, which are few, to a file.

        Args:
            version: the name of the weights.
            parent: the version published before it; None: it is the starting model.

        Raises:
            OSError: the local disk is full.
        """
        folder = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._folder))
        if self._lora is not None and version != START:
            with closing(lockstep(self._adapter())) as tensors:
                (path,) = write_tensor_files(tensors, folder, stem="adapter", max_bytes=_ONE_FILE)
            adapter = AdapterFile(
                path=path, rank=self._lora.rank, alpha=self._lora.alpha, fan_in_fan_out=self._is_transposed
            )
            return WeightSnapshot(
                version=version,
                parent=parent,
                dtype=self._dtype,
                folder=folder,
                paths=(path,),
                canary=self._canary.make(),
                adapter=adapter,
            )
        # After an error here (no memory) the tensors that are left are still gathered: the followers gather them all.
        with closing(lockstep(self._tensors())) as tensors:
            held = list(tensors)
        return WeightSnapshot(
            version=version,
            parent=parent,
            dtype=self._dtype,
            folder=folder,
            canary=self._canary.make(),
            held=held,
            max_file_bytes=self._max_bytes,
        )

    def follow(self, version: PolicyVersion) -> None:
        """Take part in the exchanges of the leader's `take`, in the other processes of a sharded model."""
        for _ in self._tensors() if self._lora is None or version == START else self._adapter():
            pass
        self._canary.make()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors, gathered one at a time; copy each into the canary's model on its way."""
        # on the way: the canary is then that of exactly the tensors that are written, rounded as they are
        copies = {} if self._published is self._model else dict(self._published.named_parameters())
        for name, tensor in published_tensors(self._model, TORCH_DTYPES[self._dtype]):
            if copies:
                assign(copies[name], tensor)
            yield name, tensor

    def _adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the adapter, a layer at a time; merge each into the canary's model on its way."""
        return adapter_tensors(self._model, dict(self._published.named_parameters()))


def write_tensor_files(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, *, stem: str, max_bytes: int
) -> Iterator[Path]:
    """Write tensors, in the order in which they come, to `stem-00001.safetensors`, `stem-00002.safetensors`, ...

    Args:
        tensors: names and contiguous CPU tensors.
        folder: for the files.
        stem: the names' first part.
        max_bytes: of tensors in one file; a single larger tensor gets a file of its own.

    Yields:
        Each file once it is complete; the caller may delete it. At least one, empty if there are no tensors.
    """
    # A file is written once it is full: the names cannot say "of N" before the last tensor is known.
    number, num_bytes = 1, 0
    pending: dict[str, Tensor] = {}
    for name, tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        # without `pending` a tensor larger than max_bytes would leave an empty file before its own
        if pending and num_bytes + size_bytes > max_bytes:
            yield _save(pending, folder / f"{stem}-{number:05d}{SUFFIX}")
            number, num_bytes, pending = number + 1, 0, {}
        pending[name] = tensor
        num_bytes += size_bytes
    yield _save(pending, folder / f"{stem}-{number:05d}{SUFFIX}")


def write_model_files(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, max_bytes: int) -> list[Path]:
    """Write tensors under the file names of a Hugging Face model.

    That is `model.safetensors` for a single file, `model-00001-of-00003.safetensors` and so on for several.
    """
    paths = list(write_tensor_files(tensors, folder, stem="model", max_bytes=max_bytes))
    if len(paths) == 1:
        return [paths[0].rename(folder / f"model{SUFFIX}")]
    return [path.rename(folder / f"{path.stem}-of-{len(paths):05d}{SUFFIX}") for path in paths]


def lockstep(items: Iterable[Item]) -> Generator[Item]:
    """Yield the items, and draw them to the last even when the consumer stops early and closes the iterator."""
    # each item of a sharded model is a collective: processes that stop at different items would wait for each other
    iterator = iter(items)
    try:
        for item in iterator:  # noqa: UP028 ("yield from" would close the iterator when this one is closed)
            yield item
    finally:
        for _ in iterator:
            pass


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of several files by name, in the order of the files; each is read on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                self._paths |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        # opened for each access: an open file would keep the disk space of a snapshot that is deleted meanwhile
        with safe_open(self._paths[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _save(tensors: dict[str, Tensor], path: Path) -> Path:
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:  # a full disk is in its text alone: callers expect an OSError
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    return path
