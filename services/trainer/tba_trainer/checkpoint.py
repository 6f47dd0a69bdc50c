"""Checkpoints in the object store: everything that a resume needs to go on bit by bit.

    runs/<run>/checkpoints/<lineage>-<step>/
        model-00001.safetensors         what is trained, whole tensors in float32; more files as they are needed
        optimizer-00001.safetensors     AdamW moments
        reference-00001.safetensors     only if the reference is no longer the starting model
        ref_logprobs-00001.safetensors  the reference's cache
        state.json                      step, counters, random numbers, reference version, guards, config digest
        manifest.json                   size and sha256 of every file above; written last

Until the manifest exists, the checkpoint does not. The buffer names the one that a resume starts from. Tensors are
whole whatever number of processes trained them, so that a resume may have another number.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import delete_incomplete, sha256_of_file
from tba.wire import StoredObject
from tba_trainer.learner import MODEL
from tba_trainer.tensor_files import SUFFIX, TensorFiles, write_tensor_files
from tba_trainer.trainer_state import TrainerState

MANIFEST, STATE = "manifest.json", "state.json"


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


class Checkpoints:
    """The checkpoints of one run in one store.

    Args:
        folder: where files lie on their way to and from the store.
        max_bytes: of tensors in one file.
    """

    def __init__(self, store: ObjectStore, run: str, *, folder: Path, max_bytes: int) -> None:
        self._store, self._run = store, run
        self.folder, self._max_bytes = folder, max_bytes
        self._prefix = f"runs/{run}/checkpoints/"

    def key(self, version: PolicyVersion) -> str:
        """Key of the checkpoint of a version, whether there is one or not."""
        return f"{self._prefix}{version}"

    def of_run(self, run: str) -> Checkpoints:
        """Those of another run in the same store."""
        return Checkpoints(self._store, run, folder=self.folder, max_bytes=self._max_bytes)

    def save(self, state: TrainerState, tensors: Iterable[tuple[str, str, Tensor]]) -> str:
        """Write a checkpoint, manifest last; returns its key. Writing it again is harmless.

        Args:
            tensors: section, name, whole tensor; section after section. One file of them is on the local disk at once.

        Raises:
            StoreUnavailableError
            OSError: the local disk is full.
        """
        key = self.key(PolicyVersion.parse(state.version))
        objects: list[StoredObject] = []
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=self.folder) as name:
            folder = Path(name)
            for section, items in groupby(tensors, key=itemgetter(0)):
                named = ((tensor_name, tensor) for _, tensor_name, tensor in items)
                for path in write_tensor_files(named, folder, stem=section, max_bytes=self._max_bytes):
                    objects.append(self._put(key, path))
                    path.unlink()
            path = folder / STATE
            path.write_text(json.dumps(state.model_dump(mode="json"), indent=1))
            objects.append(self._put(key, path))
        manifest = CheckpointManifest(run=self._run, version=state.version, objects=objects)
        self._store.put(f"{key}/{MANIFEST}", manifest.model_dump_json(indent=1).encode())
        return key

    def load(self, key: str) -> Checkpoint:
        """Fetch a checkpoint, every digest verified; the caller closes it.

        Raises:
            ObjectNotFoundError: it does not exist or was written by half.
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
        """Every complete checkpoint, oldest first."""
        names = [key.removeprefix(self._prefix).split("/") for key in self._store.list(self._prefix)]
        return sorted(PolicyVersion.parse(name[0]) for name in names if name[1:] == [MANIFEST])

    def living(self, history: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        """Those that a lineage goes back to, oldest first.

        Args:
            history: the last version of each lineage on the way to the start, as `LineageTree.ancestry` answers.
        """
        last_step = {version.lineage: version.step for version in history}
        return [version for version in self.versions() if version.step <= last_step.get(version.lineage, -1)]

    def delete_all_but(self, keep: int, *, history: Iterable[PolicyVersion], last_good_step: int) -> None:
        """Delete the checkpoints that are older than the newest `keep` of the living lineage, but not the newest one
        that a good step followed: it is what a rollback goes back to. Where nothing is known to be good, the oldest
        one stays.

        Args:
            history: of the living lineage, as for `living`.
            last_good_step: the last step whose batch was applied with no serious alarm on.
        """
        living = self.living(history)
        if not living:
            return
        oldest_kept = living[-keep:][0]
        proven = next((version for version in reversed(living) if version.step < last_good_step), living[0])
        for version in self.versions():
            if version < oldest_kept and version != proven:
                self.delete(version)

    def delete(self, version: PolicyVersion) -> None:
        """Delete one checkpoint, manifest first."""
        self._store.delete(f"{self._prefix}{version}/{MANIFEST}")
        for key in self._store.list(f"{self._prefix}{version}/"):
            self._store.delete(key)

    def delete_incomplete(self, *, before_lineage: int, keep: Collection[PolicyVersion] = ()) -> list[PolicyVersion]:
        """Delete checkpoints of older lineages that have no manifest, except `keep`; returns what was deleted."""
        return delete_incomplete(self._store, self._prefix, before_lineage=before_lineage, keep=keep)

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
