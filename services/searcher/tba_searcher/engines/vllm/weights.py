"""Weights for a running vLLM: read and hashed on their way in, and prepared beside generation.

vLLM's own reload (internals.py) does the work, because it knows how names map onto its packed layers.

    CPU   SecondModel: the next weights go into a second model, and the pause is an exchange of the two. vLLM's kernels
          keep their own packed form of a weight, and packing takes several times as long as a copy.
    GPU   HostTensors: the next weights are hashed in memory of the host, and the pause is vLLM's reload from it.

With several ranks each has all of this for its own slices; they read the same files, and share the hashing.
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
"""Tensor name -> its safetensors file."""
Entry = tuple[str, str, tuple[int, ...], str]
"""`table_entry` of a tensor."""
Entries = tuple[Entry, ...]
"""What a rank hashed of its tensors. Those of all ranks make the `params_sha256`."""
Loaded = tuple[FileStamps | None, Entries]
"""The files that are in a model (None: unknown, a load broke off), and what this rank hashed of them."""


def hashed_here(worker: WorkerModel, paths: Paths) -> frozenset[str]:
    """Return the names of the tensors that this rank hashes."""
    # every rank maps the same files, so that a tensor is the same for all of them
    return frozenset(sorted(paths)[worker.rank :: worker.num_ranks])


class HashedTensors:
    """Iterates over the tensors of safetensors files by name, and hashes those named in `own`."""

    def __init__(self, paths: Paths, own: Collection[str]) -> None:
        self._paths, self._own = paths, own
        self.entries: list[Entry] = []
        """Of the tensors that were taken and are its own."""
        self.num_taken = 0
        """How many tensors were taken."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors(self._paths):
            if name in self._own:
                self.entries.append(table_entry(name, tensor))
            self.num_taken += 1
            yield name, tensor


def read_tensors(paths: Paths) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, sorted by name; they are views of the mapped files."""
    files: dict[str, Any] = {}
    for name in sorted(paths):
        path = paths[name]
        file = files.get(path) or files.setdefault(path, safe_open(Path(path), framework="pt"))
        yield name, file.get_tensor(name)


def load_files(worker: WorkerModel, model: Any, paths: Paths) -> Entries:
    """Replace all parameters of a model of the worker by the tensors of files; return what this rank hashed.

    Raises:
        RuntimeError: vLLM did not take every tensor.
        Exception: reading failed, or vLLM did. The weights are then a mixture; the next load replaces them all.
    """
    tensors = HashedTensors(paths, hashed_here(worker, paths))
    worker.load(model, tensors)
    if tensors.num_taken != len(paths):
        raise RuntimeError(f"vLLM took {tensors.num_taken} of {len(paths)} tensors")
    return tuple(tensors.entries)


class Staging(Protocol):
    """Weights that are prepared in one thread, and used in another."""

    def stage(self, paths: Paths, stamps: FileStamps) -> None:
        """Prepare the tensors of files; forget what was prepared before."""
        ...

    def use(self, stamps: FileStamps, before: Loaded) -> Entries | None:
        """Put the prepared weights into use and return what was hashed; None: others are prepared, or none.

        Args:
            stamps: of the files that are wanted.
            before: what is in use now.
        """
        ...


class SecondModel:
    """A second model with its own weights; the layers that hold keys and values are found by name, in the first one.

    The model that was in use is the second one afterwards, so that going back costs nothing either.

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
    """All tensors in memory of the host: pinned where one rank has the GPU, else the files, mapped by all ranks.

    A rank needs its slices alone. Pinned copies would hold the whole model once for each rank; mapped files are in the
    page cache once, where hashing has brought them.
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
