"""Loads weights into a running vLLM: hashes them while it reads, and stages the next version while vLLM generates.

vLLM's own reload (internals.py) does the work, because it knows how names map onto its packed layers.

    CPU   SecondModel: staging fills a second model, and the pause only exchanges the two models. vLLM's kernels
          keep their own packed form of a weight, and packing takes several times as long as a copy.
    GPU   HostTensors: staging reads and hashes the tensors in host memory, and the pause is vLLM's reload from there.

Each rank does this for its own slices. All ranks read the same files, and each hashes a part of the tensors.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from tba.weights.digest import FileStamps, in_parallel
from tba_searcher.engines.vllm.internals import WorkerModel
from tba_searcher.engines.weight_check import table_entry

Paths = Mapping[str, str]
"""The safetensors file of each tensor, by tensor name."""
Entry = tuple[str, str, tuple[int, ...], str]
"""Name, dtype, shape and digest of a tensor (`table_entry`)."""
Entries = tuple[Entry, ...]
"""Entries of the tensors that one rank hashed. Those of all ranks together give the `params_sha256`."""
Loaded = tuple[FileStamps | None, Entries]
"""Stamps of the files that a model was loaded from (None: a load failed), and this rank's entries of them."""


def hashed_here(worker: WorkerModel, paths: Paths) -> frozenset[str]:
    """Return the names of the tensors that this rank hashes."""
    # every rank maps the same files, so that a tensor is the same for all of them
    return frozenset(sorted(paths)[worker.rank :: worker.num_ranks])


class HashedTensors:
    """Iterates over the tensors of safetensors files by name, and hashes those named in `own`."""

    def __init__(self, paths: Paths, own: Collection[str]) -> None:
        self._paths, self._own = paths, own
        self.entries: list[Entry] = []
        """Entries of the tensors read so far that are named in `own`."""
        self.num_taken = 0
        """Number of tensors read so far."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors(self._paths):
            if name in self._own:
                self.entries.append(table_entry(name, tensor))
            self.num_taken += 1
            yield name, tensor


def read_tensors(paths: Paths) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor), sorted by name; the tensors are views of memory-mapped files."""
    files: dict[str, Any] = {}
    for name in sorted(paths):
        path = paths[name]
        file = files.get(path) or files.setdefault(path, safe_open(Path(path), framework="pt"))
        yield name, file.get_tensor(name)


def load_files(worker: WorkerModel, model: Any, paths: Paths) -> Entries:
    """Replace all parameters of one of the worker's models with the tensors of files; return this rank's entries.

    Raises:
        RuntimeError: vLLM did not take every tensor.
        Exception: reading or vLLM failed. The weights are then a mixture; the next load replaces them all.
    """
    tensors = HashedTensors(paths, hashed_here(worker, paths))
    worker.load(model, tensors)
    if tensors.num_taken != len(paths):
        raise RuntimeError(f"vLLM took {tensors.num_taken} of {len(paths)} tensors")
    return tuple(tensors.entries)


class Staging(Protocol):
    """Weights that are prepared in one thread, and used in another."""

    def stage(self, paths: Paths, stamps: FileStamps) -> None:
        """Prepare the tensors of files; drop weights that were prepared before."""
        ...

    def use(self, stamps: FileStamps, before: Loaded) -> Entries | None:
        """Put the prepared weights into use and return this rank's entries; None if other files, or none, are prepared.

        Args:
            stamps: stamps of the files to use.
            before: the files and entries of the model in use now.
        """
        ...


class SecondModel:
    """Stages weights in a second model, which `use` exchanges with the model in use.

    Both use the key-value cache of the first model's layers, which vLLM finds by name. The previous model becomes the
    second one, so going back to the old weights needs no load either.

    Raises:
        RuntimeError: this model cannot be exchanged.
    """

    def __init__(self, worker: WorkerModel) -> None:
        self._worker, self._model = worker, worker.make_second()
        self._holds: Loaded = (None, ())
        self._lock = threading.Lock()

    def stage(self, paths: Paths, stamps: FileStamps) -> None:
        """See `Staging`."""
        import torch

        with self._lock, torch.no_grad():
            self._holds = (None, ())
            self._holds = (stamps, load_files(self._worker, self._model, paths))
        # glibc keeps the freed weights in the heaps of the thread that loads, in pieces that the next ones do not fit
        # into: 600 MiB more after 14 versions of a slice of 84 MiB
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def use(self, stamps: FileStamps, before: Loaded) -> Entries | None:
        """See `Staging`."""
        if not self._lock.acquire(blocking=False):  # another version is being prepared
            return None
        try:
            if self._holds[0] != stamps:
                return None
            (_, entries), self._holds = self._holds, before
            self._model = self._worker.exchange(self._model)
            return entries
        finally:
            self._lock.release()


class HostTensors:
    """Stages weights in host memory: with one rank as pinned copies, with several as memory-mapped files.

    A rank needs only its slices, but pinned copies would hold the whole model once per rank. Mapped files are in the
    page cache once; hashing reads them into it.
    """

    def __init__(self, worker: WorkerModel) -> None:
        self._worker = worker
        self._staged: tuple[FileStamps, list[tuple[str, Tensor]], Entries] | None = None

    def stage(self, paths: Paths, stamps: FileStamps) -> None:
        """See `Staging`."""
        import torch

        self._staged = None
        on_gpu, tensors = torch.cuda.is_available(), list(read_tensors(paths))
        if self._worker.num_ranks == 1:
            tensors = [(name, tensor.pin_memory() if on_gpu else tensor.clone()) for name, tensor in tensors]
        own = hashed_here(self._worker, paths)
        to_hash = [item for item in tensors if item[0] in own]
        size_bytes = sum(tensor.nbytes for _, tensor in to_hash)
        hashed = in_parallel(lambda item: table_entry(*item), to_hash, size_bytes=size_bytes)
        self._staged = (stamps, tensors, tuple(hashed))

    def use(self, stamps: FileStamps, before: Loaded) -> Entries | None:
        """See `Staging`."""
        staged = self._staged
        if staged is None or staged[0] != stamps:
            return None
        self._staged = None
        self._worker.load(self._worker.model, staged[1])
        return staged[2]
