"""Checkpoints in the object store: everything that a resume needs to continue bit for bit.

    runs/<run>/checkpoints/
        <lineage>-<step>/state.json     step, counters, random numbers, reference version, guards, config digest
        <lineage>-<step>/manifest.json  which rows of which tensor lie in which object; written last
        objects/<lineage>-<digest>.safetensors
            model          the trained parameters in float32
            optimizer      AdamW moments
            reference      only if the reference is no longer the starting model
            ref_logprobs   the reference's cache
            old_policy, old_logprobs    only with the old policy `trainer`: its copies of theta, and its cache

Until the manifest exists, the checkpoint does not. Every process of the trainer writes the rows that it holds
(parts.py). A resume may have another number of processes: each reads the rows that it will hold. Checkpoints share
equal objects; an object is deleted with the last checkpoint that names it. The buffer registers the checkpoint that a
resume starts from; if it is damaged, the resume starts from an older one (choose_checkpoint.py).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.fields import first_problem
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import checkpoint_prefix, complete_versions, delete_incomplete, sha256_of_file
from tba.wire.checkpoint_manifest import (
    CheckpointManifest,
    CheckpointObject,
    decode_checkpoint_manifest,
    object_key,
    object_name,
)
from tba.wire.weight_manifest import sha256_hex
from tba_trainer.checkpoints.parts import Part, SliceFiles, fetch_objects, staged, write_part_files
from tba_trainer.learner.learner import MODEL, SHARDED_SECTIONS, TrainerState
from tba_trainer.model.slices import Layout, Rows

MANIFEST, STATE = "manifest.json", "state.json"
log = get_logger("checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """This process's rows of a checkpoint, downloaded to local files and verified."""

    state: TrainerState
    sections: Mapping[str, SliceFiles]
    """Rows by section and name."""
    folder: Path

    def close(self) -> None:
        """Delete the local files."""
        shutil.rmtree(self.folder, ignore_errors=True)


class CheckpointStore:
    """The checkpoints of one run in one store, as one process of the trainer writes and reads them."""

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        *,
        folder: Path,
        max_bytes: int,
        layout: Layout | None = None,
        num_sharers: int = 1,
    ) -> None:
        self._store = store
        self.folder, self._max_bytes = folder, max_bytes
        self._layout = layout or Layout()
        self._num_sharers = num_sharers
        self._run, self._prefix = run, checkpoint_prefix(run)
        self._committed: tuple[PolicyVersion, dict[str, int]] | None = None
        """Version of the last checkpoint that this process committed, and the lineage of its objects by digest."""

    def key(self, version: PolicyVersion) -> str:
        """Return the key that the checkpoint of a version has or would have in the store."""
        return f"{self._prefix}{version}"

    def begin_part(self, version: PolicyVersion, rows: Rows, *, known: Mapping[str, int], in_background: bool) -> Part:
        """Return this process's part of a new checkpoint, which the caller uploads.

        Args:
            version: version of the weights.
            rows: rows that this process writes (`Learner.capture`).
            known: lineage by digest of the objects that need not be written again (`reusable_objects`).
            in_background: copy all rows to memory now if they fit; otherwise `Part.upload` copies them from the model.

        Raises:
            OSError: the local disk is full.
        """
        copies = staged(rows, num_sharers=self._num_sharers) if in_background else None
        folder = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self.folder))
        files = write_part_files(copies or rows, folder, max_bytes=self._max_bytes, layout=self._layout)
        return Part(
            self._store,
            files,
            folder,
            key=self.key(version),
            lineage=version.lineage,
            known=known,
            is_staged=copies is not None,
        )

    def reusable_objects(self, version: PolicyVersion) -> dict[str, int]:
        """Return the objects of a checkpoint that the store still has, as digests, each with the lineage that wrote it.

        Keep this checkpoint until the one that reuses its objects is registered.
        """
        if self._committed is not None and self._committed[0] == version:
            known = self._committed[1]
        else:
            try:
                known = {each.digest: each.lineage for each in self._decode(version).objects}
            except (ObjectNotFoundError, MalformedError):  # there is none: everything is written
                return {}
        # one that a bucket's rule or a person has deleted is written again, or no later checkpoint would have it
        stored = set(self._store.list(f"{self._prefix}objects/"))
        return {
            digest: lineage
            for digest, lineage in known.items()
            if f"{self._prefix}objects/{object_name(lineage, digest)}" in stored
        }

    def commit(self, state: TrainerState, objects: list[CheckpointObject]) -> str:
        """Write state and manifest of a checkpoint whose objects are in the store; return its key. Idempotent."""
        version = PolicyVersion.parse(state.version)
        key = self.key(version)
        # JSON, never a pickle: whoever can write to the store must not run code here
        text = json.dumps(state.model_dump(mode="json"), indent=1).encode()
        manifest = CheckpointManifest(
            run=self._run, version=str(version), state_sha256=sha256_hex(text), objects=objects
        )
        self._store.put(f"{key}/{STATE}", text)
        # Written last, after every object it names is stored: its existence is the commit of the checkpoint.
        self._store.put(f"{key}/{MANIFEST}", manifest.model_dump_json().encode())
        self._committed = version, {each.digest: each.lineage for each in objects}
        return key

    def load(self, key: str) -> Checkpoint:
        """Download this process's rows of a checkpoint, and verify every digest; the caller closes the result.

        Raises:
            ObjectNotFoundError: the checkpoint does not exist, or is half written.
            DigestError, MalformedError: the checkpoint is damaged.
            StoreUnavailableError: the store cannot be reached.
        """
        return self.fetch(key, self.manifest_of(key))

    def manifest_of(self, key: str) -> bytes:
        """Return the manifest of a checkpoint."""
        try:
            return self._store.get(f"{key}/{MANIFEST}")
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"the run's checkpoint {key} is not in {self._store.url}; is store.url the one that the run began with?"
            ) from None

    def fetch(self, key: str, manifest: bytes) -> Checkpoint:
        """Load a checkpoint as `load` does, with a manifest that the caller has read."""
        document = decode_checkpoint_manifest(manifest, what=f"{key}/{MANIFEST}")
        folder = Path(tempfile.mkdtemp(prefix="resume-", dir=self.folder))
        try:
            # all digests are checked before anything is loaded: a learner must not be left half restored
            sections = fetch_objects(
                self._store, document.objects, folder, key=key, layout_of=dict.fromkeys(SHARDED_SECTIONS, self._layout)
            )
            self._store.get_file(f"{key}/{STATE}", folder / STATE)
            if (found := sha256_of_file(folder / STATE)) != document.state_sha256:
                raise DigestError(
                    f"object {key}/{STATE} in {self._store.url} is damaged: sha256 {found}, the checkpoint's manifest "
                    f"says {document.state_sha256}"
                )
            if not (folder / STATE).is_file() or MODEL not in sections:
                raise MalformedError(f"checkpoint {key} lacks {STATE if MODEL in sections else MODEL}")
            try:
                state = TrainerState.model_validate_json((folder / STATE).read_bytes())
            except ValidationError as error:
                problem = first_problem(error)
                raise MalformedError(f"the checkpoint's {STATE} is not of this release: {problem}") from None
            return Checkpoint(state=state, sections=sections, folder=folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def versions(self) -> list[PolicyVersion]:
        """Return every complete checkpoint, oldest first."""
        # read off the store, not off the buffer: the buffer knows the registered one alone
        return complete_versions(self._store, self._prefix)

    def of_lineage(self, history: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        """Return the checkpoints of a lineage and of those it descends from, oldest first.

        Args:
            history: the newest version to take from each of these lineages, from `LineageTree.ancestry`.
        """
        last_step = {version.lineage: version.step for version in history}
        return [version for version in self.versions() if version.step <= last_step.get(version.lineage, -1)]

    def kept(self, keep: int, *, history: Iterable[PolicyVersion], last_good_step: int) -> list[PolicyVersion]:
        """Return the checkpoints to keep, oldest first: the newest `keep`, and the one that a rollback would return to.

        Args:
            history: history of the active lineage, as for `of_lineage`.
            last_good_step: the last step whose batch was applied with no serious alarm on.
        """
        active = self.of_lineage(history)
        # a rollback returns to the newest one that a good step followed, else to the oldest one
        proven = [version for version in active if version.step < last_good_step][-1:] or active[:1]
        newest = active[-keep:]
        return [*(version for version in proven if version not in newest), *newest]

    def delete(self, version: PolicyVersion) -> None:
        """Delete one checkpoint, and its objects that no other checkpoint names."""
        try:
            objects = self._decode(version).objects
        except (ObjectNotFoundError, MalformedError):  # the next start collects them
            objects = []
        # manifest first: a half deleted checkpoint must not look complete
        self._store.delete(f"{self._prefix}{version}/{MANIFEST}")
        for key in self._store.list(f"{self._prefix}{version}/"):
            self._store.delete(key)
        self._collect({object_key(self.key(version), each) for each in objects})

    def delete_incomplete(self, *, before_lineage: int, keep: Collection[PolicyVersion] = ()) -> list[PolicyVersion]:
        """Delete older lineages' checkpoints without a manifest, except `keep`, and their objects that no checkpoint
        names; return the deleted checkpoints."""
        deleted = delete_incomplete(self._store, self._prefix, before_lineage=before_lineage, keep=keep)
        folder = f"{self._prefix}objects/"
        names = [key.removeprefix(folder) for key in self._store.list(folder)]
        lineages = {name: name.partition("-")[0] for name in names}
        # those of this lineage and of newer ones may be on their way, and have no manifest yet
        self._collect({f"{folder}{n}" for n, lin in lineages.items() if lin.isdecimal() and int(lin) < before_lineage})
        return deleted

    def _collect(self, keys: set[str]) -> None:
        """Delete those objects of `keys` that no checkpoint names; none if some manifest cannot be read."""
        if not keys:
            return
        try:
            left = [self._decode(version) for version in self.versions()]
        except (ObjectNotFoundError, MalformedError) as error:
            # what it names is not known, and it may be of a newer release
            log.warning("checkpoint_objects_kept", num=len(keys), reason=str(error))
            return
        key = f"{self._prefix}-"  # of any checkpoint: they share the folder of objects
        named = {object_key(key, each) for manifest in left for each in manifest.objects}
        for unused in sorted(keys - named):
            self._store.delete(unused)

    def _decode(self, version: PolicyVersion) -> CheckpointManifest:
        key = self.key(version)
        return decode_checkpoint_manifest(self.manifest_of(key), what=f"{key}/{MANIFEST}")
