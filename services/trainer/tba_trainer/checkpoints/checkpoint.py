"""Checkpoints in the object store: everything that a resume needs to continue bit for bit.

    runs/<run>/checkpoints/<lineage>-<step>/
        model-00001.safetensors         the trained parameters, whole tensors in float32; more files as needed
        optimizer-00001.safetensors     AdamW moments
        reference-00001.safetensors     only if the reference is no longer the starting model
        ref_logprobs-00001.safetensors  the reference's cache
        state.json                      step, counters, random numbers, reference version, guards, config digest
        manifest.json                   size and sha256 of every file above; written last

Until the manifest exists, the checkpoint does not. Tensors are whole, however many processes trained them: a resume may
have another number. The buffer registers the checkpoint that a resume starts from; where it is damaged, a resume starts
from an older one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from tba.api import RunInfo
from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import LineageTree, PolicyVersion
from tba.weights import checkpoint_prefix, complete_versions, delete_incomplete, sha256_of_file
from tba.wire import StoredObject
from tba_trainer.checkpoints.weight_files import SUFFIX, TensorFiles, write_tensor_files
from tba_trainer.learner.learner import MODEL, TrainerState

MANIFEST, STATE = "manifest.json", "state.json"
log = get_logger("checkpoint")


class CheckpointManifest(BaseModel):
    """manifest.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    run: str
    version: str
    objects: list[StoredObject]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint on this machine, verified."""

    state: TrainerState
    sections: Mapping[str, TensorFiles]
    """Tensors by section and name."""
    folder: Path

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, eq=False)
class StagedCheckpoint:
    """The files of a checkpoint on the local disk, not yet in the store."""

    version: PolicyVersion
    paths: tuple[Path, ...]
    folder: Path

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


class CheckpointStore:
    """The checkpoints of one run in one store.

    Args:
        folder: for files on their way to and from the store.
        max_bytes: of tensors in one file.
    """

    def __init__(self, store: ObjectStore, run: str, *, folder: Path, max_bytes: int) -> None:
        self._store, self._run = store, run
        self.folder, self._max_bytes = folder, max_bytes
        self._prefix = checkpoint_prefix(run)

    def key(self, version: PolicyVersion) -> str:
        """Return the key of the checkpoint of a version, whether there is one or not."""
        return f"{self._prefix}{version}"

    def of_run(self, run: str) -> CheckpointStore:
        """Return the checkpoints of another run in the same store."""
        return CheckpointStore(self._store, run, folder=self.folder, max_bytes=self._max_bytes)

    def save(self, state: TrainerState, tensors: Iterable[tuple[str, str, Tensor]]) -> str:
        """Write a checkpoint, manifest last, and return its key. Writing it again is harmless.

        Args:
            state: names the version, hence the key.
            tensors: section, name and whole tensor, section after section.

        Raises:
            StoreUnavailableError
            OSError: the local disk is full.
        """
        version = PolicyVersion.parse(state.version)
        key = self.key(version)
        objects: list[StoredObject] = []
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=self.folder) as name:
            for path in self._write(state, tensors, Path(name)):
                objects.append(self._put(key, path))
                path.unlink()  # no more than one file is on the local disk at once
        return self._commit(key, version, objects)

    def stage(self, state: TrainerState, tensors: Iterable[tuple[str, str, Tensor]]) -> StagedCheckpoint:
        """Copy a checkpoint to the local disk, whole; the caller uploads it (in a thread, say) and closes it.

        Args:
            state, tensors: as for `save`.

        Raises:
            OSError: the local disk is full.
        """
        folder = Path(tempfile.mkdtemp(prefix="staged-", dir=self.folder))
        try:
            paths = list(self._write(state, tensors, folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return StagedCheckpoint(PolicyVersion.parse(state.version), tuple(paths), folder)

    def upload(self, staged: StagedCheckpoint, *, is_given_up: Callable[[], bool] = lambda: False) -> str | None:
        """Write a staged checkpoint to the store, manifest last, and return its key. Writing it again is harmless.

        Args:
            is_given_up: asked before each file; once it is true, nothing more is written, and None is returned.

        Raises:
            StoreUnavailableError
        """
        key = self.key(staged.version)
        objects: list[StoredObject] = []
        for path in staged.paths:
            if is_given_up():
                return None
            objects.append(self._put(key, path))
        return None if is_given_up() else self._commit(key, staged.version, objects)

    def load(self, key: str) -> Checkpoint:
        """Fetch a checkpoint, every digest verified; the caller closes it.

        Args:
            key: as `save` returned it.

        Raises:
            ObjectNotFoundError: it does not exist, or is half written.
            DigestError, MalformedError: it is damaged.
            StoreUnavailableError
        """
        try:
            manifest = CheckpointManifest.model_validate_json(self._store.get(f"{key}/{MANIFEST}"))
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"the run's checkpoint {key} is not in {self._store.url}; is store.url the one that the run began with?"
            ) from None
        except ValidationError as error:
            raise MalformedError(f"{key}/{MANIFEST} is not a checkpoint manifest: {error.errors()[0]['msg']}") from None
        folder = Path(tempfile.mkdtemp(prefix="resume-", dir=self.folder))
        try:
            # all digests are checked before anything is loaded: a learner must not be left half restored
            paths = [self._get(stored, folder) for stored in manifest.objects]
            sections: dict[str, list[Path]] = {}
            for path in paths:
                if path.suffix == SUFFIX:
                    sections.setdefault(path.stem.partition("-")[0], []).append(path)
            if STATE not in {path.name for path in paths} or MODEL not in sections:
                raise MalformedError(f"checkpoint {key} lacks {STATE if MODEL in sections else MODEL}")
            return Checkpoint(
                state=_read_state(folder / STATE),
                sections={section: TensorFiles(files) for section, files in sections.items()},
                folder=folder,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def versions(self) -> list[PolicyVersion]:
        """Return every complete checkpoint, oldest first."""
        # read off the store, not off the buffer: the buffer knows the registered one alone
        return complete_versions(self._store, self._prefix)

    def of_lineage(self, history: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        """Return the checkpoints that a lineage descends from, oldest first.

        Args:
            history: the last version of each lineage on the way to the start, from `LineageTree.ancestry`.
        """
        last_step = {version.lineage: version.step for version in history}
        return [version for version in self.versions() if version.step <= last_step.get(version.lineage, -1)]

    def kept(self, keep: int, *, history: Iterable[PolicyVersion], last_good_step: int) -> list[PolicyVersion]:
        """Return the newest `keep` checkpoints of the active lineage, oldest first, and before them one for a rollback.

        Args:
            history: of the active lineage, as for `of_lineage`.
            last_good_step: the last step whose batch was applied with no serious alarm on.
        """
        active = self.of_lineage(history)
        # a rollback returns to the newest one that a good step followed, else to the oldest one
        proven = [version for version in active if version.step < last_good_step][-1:] or active[:1]
        newest = active[-keep:]
        return [*(version for version in proven if version not in newest), *newest]

    def delete_all_but(self, kept: Sequence[PolicyVersion], *, keep: int) -> None:
        """Delete the checkpoints older than the newest `keep` of those that `kept` returned, except these."""
        # Only the active lineage is counted: abandoned checkpoints are no place to resume from, and go by their age.
        for version in self.versions():
            if kept and version < kept[-keep:][0] and version not in kept:
                self.delete(version)

    def delete(self, version: PolicyVersion) -> None:
        """Delete one checkpoint."""
        # manifest first: a half deleted checkpoint must not look complete
        self._store.delete(f"{self._prefix}{version}/{MANIFEST}")
        for key in self._store.list(f"{self._prefix}{version}/"):
            self._store.delete(key)

    def delete_incomplete(self, *, before_lineage: int, keep: Collection[PolicyVersion] = ()) -> list[PolicyVersion]:
        """Delete checkpoints of older lineages that have no manifest, except `keep`; return the deleted ones."""
        return delete_incomplete(self._store, self._prefix, before_lineage=before_lineage, keep=keep)

    def _write(self, state: TrainerState, tensors: Iterable[tuple[str, str, Tensor]], folder: Path) -> Iterator[Path]:
        """Write the files of a checkpoint one after another; the caller may delete each."""
        # sections come one after another (`Learner.capture`), so groupby need not hold any tensors back
        for section, items in groupby(tensors, key=itemgetter(0)):
            named = ((tensor_name, tensor) for _, tensor_name, tensor in items)
            yield from write_tensor_files(named, folder, stem=section, max_bytes=self._max_bytes)
        path = folder / STATE  # JSON, never a pickle: whoever can write to the store must not run code here
        path.write_text(json.dumps(state.model_dump(mode="json"), indent=1))
        yield path

    def _commit(self, key: str, version: PolicyVersion, objects: list[StoredObject]) -> str:
        # Written last, after every object it names is stored: its existence is the commit of the checkpoint.
        manifest = CheckpointManifest(run=self._run, version=str(version), objects=objects)
        self._store.put(f"{key}/{MANIFEST}", manifest.model_dump_json(indent=1).encode())
        return key

    def _put(self, key: str, path: Path) -> StoredObject:
        stored = StoredObject(
            name=path.name, key=f"{key}/{path.name}", size_bytes=path.stat().st_size, sha256=sha256_of_file(path)
        )
        self._store.put_file(stored.key, path)
        return stored

    def _get(self, stored: StoredObject, folder: Path) -> Path:
        path = folder / stored.name
        self._store.get_file(stored.key, path)
        found = sha256_of_file(path)
        if found != stored.sha256:
            raise DigestError(
                f"object {stored.key} in {self._store.url} is damaged: sha256 {found}, the checkpoint's manifest "
                f"says {stored.sha256}"
            )
        return path


def _read_state(path: Path) -> TrainerState:
    try:
        return TrainerState.model_validate(json.loads(path.read_text()))
    except (ValidationError, json.JSONDecodeError) as error:
        raise MalformedError(f"the checkpoint's {STATE} cannot be read: {error}") from None


def newest_intact(checkpoints: CheckpointStore, info: RunInfo) -> Checkpoint | None:
    """Load the newest intact checkpoint of the active lineage; None when the run has none. The caller closes it.

    Args:
        info: the run as the buffer knows it; it names the registered checkpoint.

    Raises:
        ObjectNotFoundError, DigestError, MalformedError: the registered one is missing or damaged, and no older one is
            intact.
        StoreUnavailableError
    """
    if info.checkpoint_key is None or info.checkpoint is None:
        return None
    try:
        return checkpoints.load(info.checkpoint_key)
    except (ObjectNotFoundError, DigestError, MalformedError) as error:
        # the ledger's steps after an older one become abandoned once the new lineage names it as its parent
        registered = PolicyVersion.parse(info.checkpoint)
        found = _first_intact(checkpoints, reversed(_older(checkpoints, _tree(info), registered)))
        if found is None:
            raise
        log.error(
            "checkpoint_damaged",
            checkpoint=info.checkpoint,
            error=str(error),
            resumed_from=found.state.version,
            num_steps_repeated=registered.step - PolicyVersion.parse(found.state.version).step,
        )
        return found


def older_intact(
    checkpoints: CheckpointStore, info: RunInfo, suspect: PolicyVersion, *, last_good_step: int
) -> Checkpoint | None:
    """Load the first intact checkpoint of `before_suspect`; None when there is none. The caller closes it.

    Args:
        info: the run as the buffer knows it.
        suspect: the registered checkpoint, which no good step followed.
        last_good_step: the last step whose batch was applied with no serious alarm on.

    Raises:
        StoreUnavailableError
    """
    return _first_intact(checkpoints, before_suspect(checkpoints, _tree(info), suspect, last_good_step=last_good_step))


def intact_at(checkpoints: CheckpointStore, info: RunInfo, *, step: int) -> Checkpoint | None:
    """Load the newest intact checkpoint at or before `step` that the active lineage wrote or descends from; None when
    there is none. The caller closes it.

    Args:
        info: the run as the buffer knows it.

    Raises:
        StoreUnavailableError
    """
    active = checkpoints.of_lineage(_tree(info).ancestry(PolicyVersion(info.lineage, step)))
    return _first_intact(checkpoints, (version for version in reversed(active) if version.step <= step))


def before_suspect(
    checkpoints: CheckpointStore, lineages: LineageTree, suspect: PolicyVersion, *, last_good_step: int
) -> list[PolicyVersion]:
    """Return the checkpoints that `suspect` descends from, in the order in which a rollback tries them.

    First comes the newest one that a good step followed, then older ones. Where no good step followed any, the oldest
    comes first: it is the furthest from the divergence.

    Args:
        lineages: every start of the trainer.
        suspect: the registered checkpoint, which no good step followed.
        last_good_step: the last step whose batch was applied with no serious alarm on.

    Raises:
        StoreUnavailableError
    """
    older = _older(checkpoints, lineages, suspect)
    return [version for version in reversed(older) if version.step < last_good_step] or older


def _older(checkpoints: CheckpointStore, lineages: LineageTree, version: PolicyVersion) -> list[PolicyVersion]:
    """Return the checkpoints that this one descends from, oldest first."""
    return [older for older in checkpoints.of_lineage(lineages.ancestry(version)) if older != version]


def _tree(info: RunInfo) -> LineageTree:
    return LineageTree({number: PolicyVersion.parse(text) for number, text in info.parents.items()})


def _first_intact(checkpoints: CheckpointStore, versions: Iterable[PolicyVersion]) -> Checkpoint | None:
    for version in versions:
        try:
            return checkpoints.load(checkpoints.key(version))
        except (ObjectNotFoundError, DigestError, MalformedError) as error:
            log.error("checkpoint_damaged", checkpoint=str(version), error=str(error))
    return None
