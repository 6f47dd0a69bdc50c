"""The share of a version that one process stores: all of its tensors, or those that the process owns.

    describe   digests of the tensors, and their changes since the base, encoded
    upload     whole, as changes, or both: what is best for the version is decided once all shares are described

A share reads files alone, so each process of a trainer works on its own. The manifest makes the shares one version.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from tba.errors import DigestError, MalformedError, ObjectExistsError, StoreError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.weights.assembly import check_digests, encode_changes
from tba.weights.digest import FileStamps, describe_tensors, digest_of_file, file_stamps, tensor_header
from tba.wire.weight_manifest import DeltaObject, TensorEntry, TensorFile

log = get_logger("weights")


class ShareTable(BaseModel):
    """What a share is, and the objects that it would be in the store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensors: list[TensorEntry]
    full: list[TensorFile]
    changes: list[DeltaObject] | None
    """None: nothing to encode against, or the changes have too many bytes."""


@dataclass(frozen=True, slots=True)
class ShareBase:
    """An older version that changes are encoded against."""

    paths: Sequence[Path]
    """Files of this process with its share of the tensors, or more of them."""
    digests: Mapping[str, str]
    """Tensor -> digest, of all tensors, as everyone else has them."""


class CheckedFiles:
    """Remember the tensors of the files that this process hashed last: as the next base they are not hashed again."""

    def __init__(self) -> None:
        self._known: tuple[FileStamps, Mapping[str, str]] | None = None

    def note(self, stamps: FileStamps, digests: Mapping[str, str]) -> None:
        """Remember the digests of all tensors of some files.

        Args:
            stamps: of the files, from before they were read.
        """
        self._known = stamps, digests

    def ensure(self, digests: Mapping[str, str], paths: Sequence[Path], check: Callable[[], None]) -> None:
        """Run `check` of files against the digests of a version, unless they are known to hold its tensors.

        Raises:
            DigestError, MalformedError, StoreError: of the check.
        """
        stamps = file_stamps(paths)
        if self._known is not None and self._known[0] == stamps and self._known[1].items() <= digests.items():
            return
        check()
        names = {name for path in paths for name in tensor_header(path)}
        self.note(stamps, {name: digest for name, digest in digests.items() if name in names})


class Share:
    """Stores one process's tensors of a version.

    Args:
        prefix: what the keys of the version begin with.
        paths: the safetensors files with the tensors; none where there are more processes than tensors.
        folder: for encoded changes; the caller deletes it.
        checked: what is known of this process's files.
        stem: what the names of changes begin with, different in every process.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        paths: Sequence[Path],
        folder: Path,
        *,
        checked: CheckedFiles,
        stem: str = "delta",
    ) -> None:
        self._store, self._prefix, self._paths, self._folder, self._stem = store, prefix, paths, folder, stem
        self._checked = checked
        self._files: dict[str, Path] = {}
        self._table = ShareTable(tensors=[], full=[], changes=None)

    def describe(self, base: ShareBase | None, *, max_bytes: float) -> ShareTable:
        """Hash the tensors, and encode what has changed since `base`.

        Args:
            max_bytes: of all shares' changes; more than that do not pay, and are not encoded to the end.

        Raises:
            MalformedError: not a safetensors file.
            StoreError: a file cannot be read.
        """
        stamps = file_stamps(self._paths)
        tensors = describe_tensors(self._paths)
        full = [
            TensorFile(name=path.name, key=self._prefix + path.name, size_bytes=path.stat().st_size)
            for path in self._paths
        ]
        changes, paths = None, None if base is None else self._encode(base, max_bytes)
        if paths is not None:
            changes = [describe_changes(self._prefix, path, stem=path.stem) for path in paths]
            self._files = {stored.key: path for stored, path in zip(changes, paths, strict=True)}
        self._table = ShareTable(tensors=tensors, full=full, changes=changes)
        self._checked.note(stamps, {each.name: each.digest for each in tensors})  # the next version's base
        return self._table

    def upload(self, *, whole: bool, changes: bool) -> None:
        """Store the tensors, their changes, or both; what is there already stays.

        Raises:
            ObjectExistsError: a file of the version is there with other tensors.
            StoreUnavailableError
        """
        if changes:
            for stored in self._table.changes or ():
                put_file(self._store, stored.key, stored.size_bytes, self._files[stored.key])
        if whole:
            for stored, path in zip(self._table.full, self._paths, strict=True):
                self._put_full(stored, path)

    def _encode(self, base: ShareBase, max_bytes: float) -> list[Path] | None:
        if not self._paths:
            return []
        started = time.monotonic()
        try:
            # a delta against files that are not the base that others have would be of no use to anyone
            self._checked.ensure(base.digests, base.paths, lambda: check_digests(base.digests, base.paths))
            paths = encode_changes(base.paths, self._paths, self._folder, stem=self._stem, max_bytes=max_bytes)
        except (StoreError, MalformedError) as error:  # the version is stored whole, which needs none of it
            log.warning("delta_not_made", prefix=self._prefix, reason=str(error))
            return None
        pays = paths is not None
        log.info("delta_encoded", prefix=self._prefix, pays=pays, encode_s=round(time.monotonic() - started, 3))
        return paths

    def _put_full(self, stored: TensorFile, path: Path) -> None:
        try:
            self._store.put_file(stored.key, path, create_only=True)
        except ObjectExistsError:
            # a trainer killed after the upload leaves the same tensors, and they may be published; others never
            members = {entry.name: entry for entry in self._table.tensors if entry.file == stored.name}
            with tempfile.TemporaryDirectory(prefix="tba-compare-") as folder:
                found = Path(folder) / stored.name
                self._store.get_file(stored.key, found)
                try:
                    is_same = found.stat().st_size == stored.size_bytes
                    is_same = is_same and {entry.name: entry for entry in describe_tensors([found])} == members
                except (DigestError, MalformedError):
                    is_same = False
            if not is_same:
                raise ObjectExistsError(
                    f"{stored.key} in {self._store.url} holds other tensors; another trainer published it, or was "
                    "killed while it did: take a new lineage, or delete the object"
                ) from None


class OtherShares(Protocol):
    """The shares of a version that other processes store. Each `begin` is followed by its `wait`."""

    @property
    def size_bytes(self) -> int:
        """Of their tensors."""
        ...

    def begin_describe(self, base: Mapping[str, str] | None, *, max_bytes: float) -> None:
        """Have them do as `Share.describe`.

        Args:
            base: digests of the base's tensors; None: nothing to encode against.
        """
        ...

    def wait_described(self) -> list[ShareTable]:
        """Return what they are."""
        ...

    def begin_upload(self, *, whole: bool, changes: bool) -> None:
        """Have them do as `Share.upload`."""
        ...

    def wait_uploaded(self) -> None:
        """Return once all are stored."""
        ...


def describe_changes(prefix: str, path: Path, *, stem: str) -> DeltaObject:
    """Return the object that a file of changes, or of an adapter, becomes below `prefix`."""
    # named by its content: what a killed trainer left under the version never stands in the way
    digest = digest_of_file(path)
    name = f"{stem}-{digest}{path.suffix}"
    return DeltaObject(name=name, key=prefix + name, size_bytes=path.stat().st_size, digest=digest)


def put_file(store: ObjectStore, key: str, size_bytes: int, path: Path) -> None:
    """Store a file under a key that names its content, unless it is there."""
    if store.size_bytes(key) != size_bytes:
        store.put_file(key, path)
