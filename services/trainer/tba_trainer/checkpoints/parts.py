"""The part of a checkpoint that one process writes, and the rows of a checkpoint that it reads.

    rows on the device --> memory, if staged --> a file on the local disk --digest--> an object in the store, if it is
                                                                                      not there

A part is copied to host memory before the next step, and uploaded while training goes on. If memory is short, it is
uploaded before the next step instead.

A file has rows of one section, at most `FILE_BYTES` of them. Two kinds of tensors have files of their own: scalars of a
sharded model, which every process needs, and each copy of the old policy, which changes at other times.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open

from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.weights.digest import digest_of_file, tensor_header
from tba.wire.checkpoint_manifest import CheckpointObject, Slice, object_key
from tba_trainer.checkpoints.weight_files import write_tensor_files
from tba_trainer.model import host_memory
from tba_trainer.model.host_memory import HostMemoryError, free_bytes, kept_pinned_bytes
from tba_trainer.model.slices import Layout, Rows, TensorSlice

STAGING_FREE_SHARE = 0.75
"""Share of the free memory that copies of a checkpoint may take. The rest is for weight versions and other work."""
log = get_logger("checkpoint")


@dataclass(frozen=True, slots=True)
class PartFile:
    """A local file with rows of tensors of one section."""

    path: Path
    section: str
    slices: Mapping[str, Slice]


def write_part_files(
    rows: Iterable[tuple[str, str, TensorSlice]], folder: Path, *, max_bytes: int, layout: Layout
) -> Iterator[PartFile]:
    """Write rows to files, and yield each file when it is complete; the caller may delete it.

    Args:
        rows: (section, name, rows), ordered by section; at most the rows of one file are in memory at once.
        max_bytes: largest number of bytes of rows in one file.
        layout: layout of the model.
    """

    def group(item: tuple[str, str, TensorSlice]) -> tuple[str, str]:
        section, name, piece = item
        copy, is_of_copy, _ = name.partition("/")  # names of the old policy's copies, `VERSIONS/NAME`
        if is_of_copy:
            return section, f"{section}-{copy}"
        return section, f"{section}-scalars" if layout.num > 1 and not piece.shape else section

    for (section, stem), items in groupby(rows, key=group):
        slices: dict[str, Slice] = {}
        for path in write_tensor_files(_noted(items, slices), folder, stem=stem, max_bytes=max_bytes):
            names = tensor_header(path).keys()
            yield PartFile(path, section, {name: piece for name, piece in slices.items() if name in names})


def _noted(
    rows: Iterable[tuple[str, str, TensorSlice]], slices: dict[str, Slice]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors, and record in `slices` which rows they are."""
    for _, name, piece in rows:
        slices[name] = Slice(begin=piece.begin, end=piece.end, shape=list(piece.shape))
        yield name, piece.tensor


class Part:
    """The part of a checkpoint that one process uploads.

    Args:
        files: the files, each written when the iterator reaches it, and deleted once it is stored.
        folder: folder of the files, deleted after the upload.
        key: key of the checkpoint.
        lineage: lineage of this trainer.
        known: lineage by digest of objects of older checkpoints, which are not written again.
        is_staged: all rows were copied to memory.
    """

    def __init__(
        self,
        store: ObjectStore,
        files: Iterable[PartFile],
        folder: Path,
        *,
        key: str,
        lineage: int,
        known: Mapping[str, int],
        is_staged: bool,
    ) -> None:
        self.is_staged = is_staged
        self.objects: list[CheckpointObject] = []
        """The objects of this part that are in the store so far."""
        self._store, self._files, self._folder = store, files, folder
        self._key, self._lineage, self._known = key, lineage, dict(known)
        self._given_up = threading.Event()

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Stop the upload after the object that is being written now."""
        self._given_up.set()

    def upload(self) -> None:
        """Upload all files except those in `known`, then delete the folder."""
        try:
            for file in self._files:
                if self.is_given_up:
                    return
                digest = digest_of_file(file.path)
                stored = CheckpointObject(
                    section=file.section,
                    lineage=self._known.get(digest, self._lineage),
                    digest=digest,
                    size_bytes=file.path.stat().st_size,
                    slices=dict(file.slices),
                )
                # Not asked of the store: only what a checkpoint names that stays until this one is registered cannot
                # be deleted meanwhile.
                if digest not in self._known:
                    self._store.put_file(object_key(self._key, stored), file.path)
                    self._known[digest] = self._lineage  # right after a reset, the reference is theta
                self.objects.append(stored)
                file.path.unlink()  # one at a time is on the disk
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def staged(rows: Rows, *, num_sharers: int) -> Iterator[tuple[str, str, TensorSlice]] | None:
    """Copy rows to host memory, and return them as an iterator that frees each after use; None: memory is short.

    Args:
        num_sharers: number of processes of the trainer on this machine, which copy at the same time.
    """
    # What torch keeps pinned from the checkpoint before is this process's own, and takes nothing from the others. Of
    # more than that checkpoint had, a snapshot's say, the pieces may have other sizes.
    kept = min(kept_pinned_bytes(), host_memory.counts["checkpoint_bytes"])
    free, needed = free_bytes(), max(0, rows.num_bytes - kept)
    try:
        if free is None or needed > STAGING_FREE_SHARE * free / num_sharers:
            raise HostMemoryError(f"{needed} bytes are needed, and {free} are free for {num_sharers} processes")
        copies = deque(rows)
    except HostMemoryError as error:
        host_memory.counts["checkpoint_not_staged"] += 1
        log.warning("checkpoint_not_staged", num_bytes=rows.num_bytes, reason=str(error))
        return None
    host_memory.counts["checkpoint_bytes"] = max(host_memory.counts["checkpoint_bytes"], rows.num_bytes)
    # none that was yielded is held: its memory is free once it is in a file
    return (copies.popleft() for _ in range(len(copies)))


class SliceFiles(Mapping[str, TensorSlice]):
    """This process's rows of the tensors of one section, by name, read from local files on each access.

    Args:
        layout: how the tensors are sharded; None: they are not, so every process needs them whole.
    """

    def __init__(self, layout: Layout | None) -> None:
        self._layout = layout or Layout()
        self._pieces: dict[str, list[tuple[Slice, Path]]] = {}

    def needs(self, slices: Mapping[str, Slice]) -> bool:
        """Return whether this process needs any of these rows; a tensor without rows is needed by all."""
        for piece in slices.values():
            begin, end = self._wanted(piece)
            if (begin < piece.end and piece.begin < end) or piece.begin == piece.end:
                return True
        return False

    def add(self, slices: Mapping[str, Slice], path: Path | None) -> None:
        """Record the file that has these rows (None: this process needs none of them)."""
        if path is not None:
            shapes = {name: tuple(entry["shape"]) for name, entry in tensor_header(path).items()}
            expected = {name: _shape(piece, piece.begin, piece.end) for name, piece in slices.items()}
            if shapes != expected:
                odd = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
                raise MalformedError(f"object {path.name} does not hold what the manifest says of {odd[0]!r}")
        for name, piece in slices.items():
            pieces = self._pieces.setdefault(name, [])
            pieces.append((piece, path or Path()))
            pieces.sort(key=lambda each: each[0].begin)

    def __getitem__(self, name: str) -> TensorSlice:
        pieces = self._pieces[name]
        first, _ = pieces[0]
        shape = tuple(first.shape)
        begin, end = self._wanted(first)
        found = []
        for rows, path in pieces:
            low, high = max(begin, rows.begin), min(end, rows.end)
            if low >= high and shape[:1] != (0,):
                continue
            with safe_open(path, framework="pt") as file:
                if (low, high) == (rows.begin, rows.end):
                    found.append(file.get_tensor(name))
                else:
                    found.append(file.get_slice(name)[low - rows.begin : high - rows.begin])
        if not found:  # fewer rows than processes
            found.append(torch.empty(_shape(first, begin, end)))
        return TensorSlice(found[0] if len(found) == 1 else torch.cat(found), begin, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def _wanted(self, piece: Slice) -> tuple[int, int]:
        # a scalar is not cut: the step count of AdamW
        return self._layout.rows(piece.shape) if piece.shape else (0, 1)


def fetch_objects(
    store: ObjectStore, objects: Sequence[CheckpointObject], folder: Path, *, key: str, layout_of: Mapping[str, Layout]
) -> dict[str, SliceFiles]:
    """Download the objects with rows that this process needs, verify each, and return the rows by section.

    Args:
        folder: folder for the files.
        key: key of the checkpoint.
        layout_of: layout of each sharded section; every process needs the other sections whole.

    Raises:
        ObjectNotFoundError, DigestError, MalformedError: an object is missing or damaged.
        StoreUnavailableError: the store cannot be reached.
    """
    sections: dict[str, SliceFiles] = {}
    for each in objects:
        files = sections.setdefault(each.section, SliceFiles(layout_of.get(each.section)))
        path = folder / each.name if files.needs(each.slices) else None
        if path is not None and not path.exists():  # two parts may be equal, and are one object then
            name = object_key(key, each)
            try:
                store.get_file(name, path)
            except ObjectNotFoundError:
                raise ObjectNotFoundError(f"object {name} of checkpoint {key} is not in {store.url}") from None
            if (found := digest_of_file(path)) != each.digest:
                raise DigestError(
                    f"object {name} of checkpoint {key} in {store.url} is damaged: its digest is {found}, the manifest "
                    f"says {each.digest}"
                )
        files.add(each.slices, path)
    return sections


def _shape(piece: Slice, begin: int, end: int) -> tuple[int, ...]:
    return (end - begin, *piece.shape[1:]) if piece.shape else ()
