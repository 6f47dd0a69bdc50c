"""The part of a checkpoint that one process writes, and the rows of one that it reads.

    rows on the device --copy--> memory --> files on the local disk --digest--> objects in the store, if they are
                                            not there

Before the next step a part is copied to memory of the host where enough is free, else to the files (`Staging`).

Files hold the rows of one section, at most `FILE_BYTES` of them. What other processes need as well, or what
changes at another time, has files of its own: scalars of a sharded model, and each copy of the old policy.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from tba.config.trainer import STAGING_FREE_SHARE
from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.weights.digest import digest_of_file, tensor_header
from tba.wire.checkpoint_manifest import CheckpointObject, Slice, object_key
from tba_trainer.checkpoints.weight_files import write_tensor_files
from tba_trainer.model import host_memory
from tba_trainer.model.host_memory import HostMemoryError, free_bytes, kept_pinned_bytes
from tba_trainer.model.slices import Layout, Rows, TensorSlice

Place = Literal["memory", "disk"]
log = get_logger("checkpoint")


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of one section."""

    path: Path
    section: str
    slices: Mapping[str, Slice]


def write_part_files(
    rows: Iterable[tuple[str, str, TensorSlice]], folder: Path, *, max_bytes: int, layout: Layout
) -> Iterator[PartFile]:
    """Write rows to files, one after another; the caller may delete each.

    Args:
        rows: section, name and rows, section after section; no more than one file's are held at once.
        max_bytes: of rows in one file.
        layout: of the model.

    Raises:
        OSError: the disk is full.
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
    """Yield names and tensors, and note which rows they are."""
    for _, name, piece in rows:
        slices[name] = Slice(begin=piece.begin, end=piece.end, shape=list(piece.shape))
        yield name, piece.tensor


class Part:
    """The part of one process on its way to the store.

    Args:
        files: on the local disk, or written as they are asked for; each is deleted once it is stored.
        folder: of the files; deleted at the end.
        key: of the checkpoint.
        lineage: of this trainer.
        known: digest -> lineage of the objects that the checkpoint before this one has in the store.
        place: where all of it was copied to; None: nowhere yet.
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
        place: Place | None = None,
    ) -> None:
        self.place: Place | None = place
        self.objects: list[CheckpointObject] = []
        """Those that are in the store."""
        self._store, self._files, self._folder = store, files, folder
        self._key, self._lineage, self._known = key, lineage, dict(known)
        self._given_up = threading.Event()

    @property
    def is_given_up(self) -> bool:
        """Whether nothing more is to be written."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Write no further object; one that is under way is finished."""
        self._given_up.set()

    def upload(self) -> None:
        """Write all objects that the store does not hold.

        Raises:
            StoreUnavailableError
            OSError: the local disk is full.
        """
        try:
            for file in self._files:
                if self.is_given_up:
                    return
                self.objects.append(self._put(file))
                file.path.unlink()  # where files are made as they are asked for, one at a time is on the disk
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _put(self, file: PartFile) -> CheckpointObject:
        digest = digest_of_file(file.path)
        stored = CheckpointObject(
            section=file.section,
            lineage=self._known.get(digest, self._lineage),
            digest=digest,
            size_bytes=file.path.stat().st_size,
            slices=dict(file.slices),
        )
        # Not asked of the store: only what a checkpoint names that stays until this one is registered cannot be
        # deleted meanwhile.
        if digest not in self._known:
            self._store.put_file(object_key(self._key, stored), file.path)
            self._known[digest] = self._lineage  # right after a reset, the reference is theta
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Where parts that are uploaded beside training are copied to first."""

    place: Literal["auto", "memory", "disk"] = "disk"
    """`auto`: memory where STAGING_FREE_SHARE of what is free, within the limit of the container, holds the copies."""
    num_sharers: int = 1
    """Processes of the trainer on this machine: they copy at the same time."""

    def choose(self, num_bytes: int) -> Place:
        """Return where copies of so many bytes go now."""
        if self.place != "auto":
            return self.place
        # What torch keeps pinned from the checkpoint before is this process's own, and takes nothing from the others.
        # Of more than that checkpoint had, a snapshot's say, the pieces may have other sizes.
        kept = min(kept_pinned_bytes(), host_memory.counts["checkpoint_bytes"])
        free, needed = free_bytes(), max(0, num_bytes - kept)
        place: Place = "disk" if free is None or needed > STAGING_FREE_SHARE * free / self.num_sharers else "memory"
        log.info(
            "checkpoint_staging",
            place=place,
            num_bytes=num_bytes,
            kept_bytes=kept,
            free_bytes=free,
            num_processes=self.num_sharers,
        )
        return place


ON_DISK = Staging()


class PartStaging:
    """Makes the parts of one process.

    Args:
        folder: for files on their way.
        max_bytes: of rows in one file.
        layout: of the model.
    """

    def __init__(self, store: ObjectStore, *, folder: Path, max_bytes: int, layout: Layout, staging: Staging) -> None:
        self._store, self._folder, self._max_bytes, self._layout = store, folder, max_bytes, layout
        self._staging = staging

    def begin(self, rows: Rows, *, key: str, lineage: int, known: Mapping[str, int], staged: bool) -> Part:
        """Return the part that the rows are.

        Args:
            staged: copy all rows off the device now; otherwise they are read when `Part.upload` comes to them.
            key, lineage, known: as of `Part`.

        Raises:
            OSError: the local disk is full.
        """
        place = self._staging.choose(rows.num_bytes) if staged else None
        copies: Iterable[tuple[str, str, TensorSlice]] = rows
        if place == "memory":
            try:
                copies = _emptied(deque(rows))
                largest = host_memory.counts["checkpoint_bytes"]
                host_memory.counts["checkpoint_bytes"] = max(largest, rows.num_bytes)
            except HostMemoryError as error:
                host_memory.counts["checkpoint_on_disk"] += 1
                log.warning("checkpoint_staged_on_disk", num_bytes=rows.num_bytes, error=str(error))
                place = "disk"
        folder = Path(tempfile.mkdtemp(prefix=f"{key.rpartition('/')[2]}-", dir=self._folder))
        files: Iterable[PartFile] = write_part_files(copies, folder, max_bytes=self._max_bytes, layout=self._layout)
        try:
            if place == "disk":
                files = list(files)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Part(self._store, files, folder, key=key, lineage=lineage, known=known, place=place)


def _emptied(rows: deque[tuple[str, str, TensorSlice]]) -> Iterator[tuple[str, str, TensorSlice]]:
    """Yield rows, and hold none that was yielded: their memory is free once they are in a file."""
    while rows:
        yield rows.popleft()


@dataclass(frozen=True, slots=True)
class _Piece:
    rows: Slice
    path: Path


class SliceFiles(Mapping[str, TensorSlice]):
    """The rows that this process holds of the tensors of one section; each tensor is read on access.

    Args:
        layout: how the tensors are cut; None: they are not, and every process needs them whole.
    """

    def __init__(self, layout: Layout | None) -> None:
        self._layout = layout or Layout()
        self._pieces: dict[str, list[_Piece]] = {}

    def needs(self, slices: Mapping[str, Slice]) -> bool:
        """Return whether rows that this process holds are among these, or a tensor without rows."""
        for piece in slices.values():
            begin, end = self._wanted(piece)
            if (begin < piece.end and piece.begin < end) or piece.begin == piece.end:
                return True
        return False

    def add(self, slices: Mapping[str, Slice], path: Path | None) -> None:
        """Add rows that lie in a file; None: this process needs none of them.

        Raises:
            MalformedError: the file holds other tensors.
        """
        if path is not None:
            shapes = {name: tuple(entry["shape"]) for name, entry in tensor_header(path).items()}
            expected = {name: _shape(piece, piece.begin, piece.end) for name, piece in slices.items()}
            if shapes != expected:
                odd = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
                raise MalformedError(f"object {path.name} does not hold what the manifest says of {odd[0]!r}")
        for name, piece in slices.items():
            pieces = self._pieces.setdefault(name, [])
            pieces.append(_Piece(piece, path or Path()))
            pieces.sort(key=lambda each: each.rows.begin)

    def __getitem__(self, name: str) -> TensorSlice:
        pieces = self._pieces[name]
        shape = tuple(pieces[0].rows.shape)
        begin, end = self._wanted(pieces[0].rows)
        found = []
        for piece in pieces:
            low, high = max(begin, piece.rows.begin), min(end, piece.rows.end)
            if low >= high and shape[:1] != (0,):
                continue
            with safe_open(piece.path, framework="pt") as file:
                if (low, high) == (piece.rows.begin, piece.rows.end):
                    found.append(file.get_tensor(name))
                else:
                    found.append(file.get_slice(name)[low - piece.rows.begin : high - piece.rows.begin])
        if not found:  # fewer rows than processes
            found.append(torch.empty(_shape(pieces[0].rows, begin, end)))
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
    """Fetch the objects with rows that this process holds, each verified; return the rows by section.

    Args:
        folder: for the files.
        key: of the checkpoint.
        layout_of: the sections that are cut; of others every process needs all.

    Raises:
        ObjectNotFoundError, DigestError, MalformedError: an object is missing or damaged.
        StoreUnavailableError
    """
    sections: dict[str, SliceFiles] = {}
    for each in objects:
        files = sections.setdefault(each.section, SliceFiles(layout_of.get(each.section)))
        path = folder / each.name if files.needs(each.slices) else None
        if path is not None and not path.exists():  # two parts may be equal, and are one object then
            fetch_object(store, each, path, key=key)
        files.add(each.slices, path)
    return sections


def fetch_object(store: ObjectStore, stored: CheckpointObject, path: Path, *, key: str) -> None:
    """Fetch an object of the checkpoint `key` into a file.

    Raises:
        ObjectNotFoundError, DigestError: it is missing or damaged.
        StoreUnavailableError
    """
    name = object_key(key, stored)
    try:
        store.get_file(name, path)
    except ObjectNotFoundError:
        raise ObjectNotFoundError(f"object {name} of checkpoint {key} is not in {store.url}") from None
    if (found := digest_of_file(path)) != stored.digest:
        raise DigestError(
            f"object {name} of checkpoint {key} in {store.url} is damaged: its digest is {found}, the manifest says "
            f"{stored.digest}"
        )


def _shape(piece: Slice, begin: int, end: int) -> tuple[int, ...]:
    return (end - begin, *piece.shape[1:]) if piece.shape else ()
