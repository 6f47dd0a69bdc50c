"""Weights as files: named tensors in safetensors files of bounded size, and snapshots of a version to publish.

    theta --WeightSnapshotWriter.take--> WeightSnapshot: tensors and canary of a version, between two steps
                                             --write--> tensor files, beside training

With a sharded model every process takes a snapshot of its share of the tensors, of about the same size in each. The
leader takes the starting model and adapters as a whole.

The tensors of at most one snapshot are in memory; `write` moves them to files. `write_tensor_files` has at most the
tensors of one file in memory. All files are in a temporary folder until they are uploaded.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tba.config import Recipe
from tba.versions import START, PolicyVersion
from tba.weights.adapter import AdapterFile
from tba.weights.publishing import OtherShares
from tba.wire import Canary
from tba_trainer.checkpoints.canary import CanaryMaker
from tba_trainer.model.parameters import (
    adapter_tensors,
    assign,
    has_adapter,
    has_transposed_weights,
    plain_parameters,
    published_tensors,
)
from tba_trainer.model.policy import TORCH_DTYPES, frozen_copy
from tba_trainer.model.sharding import rounds_weights

SUFFIX = ".safetensors"
FILE_BYTES = 2 * 1024**3
"""Largest size of a file of weights or of a checkpoint (a larger tensor has a file of its own). So at most this many
bytes of a gathered model are in the trainer's memory at once."""
_ONE_FILE = 2**62
"""Bound of the file of an adapter, which must be one file: peft and vLLM read no other form."""
Item = TypeVar("Item")


class SharesOfTeam(OtherShares, Protocol):
    """The other processes' shares of a version, whose files they keep until `close`."""

    base: SharesOfTeam | None
    """The other processes' shares of the version that changes are encoded against."""

    def give_up(self) -> None:
        """End the current wait for the other processes."""
        ...

    def missing(self) -> str:
        """Return the names of the processes that are waited for now, for a message; empty: none."""
        ...

    def close(self) -> None:
        """Make the other processes delete their files."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class WeightSnapshot:
    """The weights of one version, or this process's share of them, to be written to files and published."""

    version: PolicyVersion
    parent: PolicyVersion | None
    dtype: str
    folder: Path
    """Folder that holds the files of this snapshot and nothing else."""
    canary: Canary
    paths: tuple[Path, ...] = ()
    """safetensors files with the named parameters in `dtype`, once `write` has returned; or the file of the adapter."""
    adapter: AdapterFile | None = None
    """The adapter, if the version is the starting model with an adapter; None: the version is in `paths`."""
    held: dict[str, Tensor] = field(default_factory=dict)
    """Named parameters in memory, not in a file yet."""
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the parameters that go into each file, by file name."""
    others: SharesOfTeam | None = None
    """The shares that the other processes have taken; None: there are none."""
    is_share: bool = False
    """Whether a part of the version is in `others`; otherwise all of it is here."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self) -> None:
        """Write the tensors in memory to files, once, and free them; a second caller waits for the first.

        Raises:
            OSError: the local disk is full; all tensors stay in memory.
        """
        with self._lock:
            if self.held:
                paths = [
                    _save({name: self.held[name] for name in names}, self.folder / file)
                    for file, names in self.files.items()
                ]
                self.paths, self.held = tuple(paths), {}

    @property
    def tensors(self) -> TensorFiles:
        """The named parameters of this snapshot, read from files. Calls `write` first."""
        self.write()
        return TensorFiles(self.paths)

    def close(self) -> None:
        """Delete the files, in all processes."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.others is not None:
            self.others.close()


class WeightSnapshotWriter:
    """Takes snapshots of theta."""

    def __init__(self, model: Any, recipe: Recipe, *, folder: Path, rank: int = 0, num_ranks: int = 1) -> None:
        self._model, self._folder = model, folder
        self._dtype = recipe.model.dtype
        # the canary is computed from the published tensors in the published dtype: where theta differs (another dtype,
        # an adapter that is not merged, weights that are rounded for a pass), a second copy of the model holds them
        dtype = TORCH_DTYPES[self._dtype]
        same = all(p.dtype == dtype for p in model.parameters())
        same = same and not has_adapter(model) and not rounds_weights(model)
        self._published = model if same else frozen_copy(model, dtype)
        self._canary = CanaryMaker(model, self._published, recipe)
        self._lora = recipe.model.lora
        self._is_transposed = self._lora is not None and has_transposed_weights(model)
        self._sizes = {name: dtype.itemsize * each.numel() for name, each in plain_parameters(model).items()}
        [self._whole] = share_files(self._sizes, num_shares=1, max_bytes=FILE_BYTES)
        self._own = share_files(self._sizes, num_shares=num_ranks, max_bytes=FILE_BYTES)[rank]

    def take(
        self, version: PolicyVersion, parent: PolicyVersion | None, *, folder: Path | None = None
    ) -> WeightSnapshot:
        """Copy to memory this process's share of the current weights, or all of the starting model.

        An adapter, which is small, is written to a file instead. A collective for a sharded model (see `follow`).

        Args:
            version: the version of the weights.
            parent: the version published before it; None: it is the starting model.
            folder: folder for its files alone; None: a new one.
        """
        folder = folder or self._new_folder(version)
        if self._lora is not None and version != START:
            merged = dict(self._published.named_parameters())
            with closing(lockstep(adapter_tensors(self._model, merged))) as tensors:
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
        # searchers, adapters and the check of a resume need the starting model, once in a run
        return self._take(self._whole if version == START else self._own, version, parent, folder)

    def follow(self, version: PolicyVersion) -> WeightSnapshot | None:
        """Run the collectives of the leader's `take` in a follower.

        Returns:
            This process's share; None with LoRA, where the leader alone takes snapshots.
        """
        if self._lora is None:
            return self._take(self._own, version, None, None)
        merged = dict(self._published.named_parameters())
        for _ in self._tensors(()) if version == START else adapter_tensors(self._model, merged):
            pass
        self._canary.make()
        return None

    def _new_folder(self, version: PolicyVersion) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._folder))

    def _take(
        self,
        files: Mapping[str, Sequence[str]],
        version: PolicyVersion,
        parent: PolicyVersion | None,
        folder: Path | None,
    ) -> WeightSnapshot:
        names = {name for each in files.values() for name in each}
        # After an error here (no memory) the tensors that are left are still gathered: the others gather them all.
        with closing(lockstep(self._tensors(names))) as tensors:
            held = {name: tensor for name, tensor in tensors if name in names}
        canary = self._canary.make()
        return WeightSnapshot(
            version=version,
            parent=parent,
            dtype=self._dtype,
            folder=folder or self._new_folder(version),  # only after the exchanges an error is this process's own
            canary=canary,
            held=held,
            files=files,
        )

    def _tensors(self, kept: Container[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors, gathered one at a time; copy each into the canary's model on its way.

        Args:
            kept: names of the tensors to copy to the CPU.
        """
        # on the way: the canary is then that of exactly the tensors that are written, rounded as they are
        copies = {} if self._published is self._model else dict(self._published.named_parameters())
        for name, tensor in published_tensors(self._model, TORCH_DTYPES[self._dtype], on_host=kept):
            if copies:
                assign(copies[name], tensor)
            yield name, tensor


def share_files(sizes: Mapping[str, int], *, num_shares: int, max_bytes: int) -> list[dict[str, list[str]]]:
    """Divide tensors into shares of about the same bytes, and shares into files; every process gets the same result.

    Args:
        sizes: bytes of each tensor by name; files have the tensors in this order.
        max_bytes: largest number of bytes of tensors in one file; a single larger tensor gets a file of its own.

    Returns:
        For each share the tensor names of each file, by file name. A single share has at least one file, perhaps empty.
    """
    # whole tensors, since a digest is of a whole one; the largest first, each to the share that is smallest by then
    shares: list[set[str]] = [set() for _ in range(num_shares)]
    filled = [0] * num_shares
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        index = filled.index(min(filled))
        shares[index].add(name)
        filled[index] += sizes[name]
    cut: list[list[list[str]]] = []
    for share in shares:
        names: list[list[str]] = []
        num_bytes = 0
        for name in (name for name in sizes if name in share):
            if not names or num_bytes + sizes[name] > max_bytes:
                names.append([])
                num_bytes = 0
            names[-1].append(name)
            num_bytes += sizes[name]
        cut.append(names if names or num_shares > 1 else [[]])
    total = sum(map(len, cut))
    numbers = iter(range(1, total + 1))
    # as the files of a Hugging Face model
    name = f"model{SUFFIX}" if total == 1 else f"model-{{:05d}}-of-{total:05d}{SUFFIX}"
    return [{name.format(next(numbers)): names for names in share} for share in cut]


def write_tensor_files(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, *, stem: str, max_bytes: int
) -> Iterator[Path]:
    """Write tensors, in the order in which they come, to `stem-00001.safetensors`, `stem-00002.safetensors`, ...

    Args:
        tensors: names and contiguous CPU tensors.
        folder: folder for the files.
        stem: first part of the file names.
        max_bytes: largest number of bytes of tensors in one file; a single larger tensor gets a file of its own.

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


def lockstep(items: Iterable[Item]) -> Generator[Item]:
    """Yield the items. If the consumer stops early, still draw the rest, because each item may be a collective."""
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
