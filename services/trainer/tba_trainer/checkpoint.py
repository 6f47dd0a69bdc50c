"""Checkpoints in the object store: everything that a resume needs to go on bit by bit.

    runs/<run>/checkpoints/<lineage>-<step>/
        model.safetensors         float32 master weights
        optimizer.safetensors     AdamW moments
        reference.safetensors     only if the reference is no longer the starting model
        ref_logprobs.safetensors  the reference's cache
        state.json                step, lineage, counters, random numbers, reference version, config digest
        manifest.json             size and sha256 of every file above; written last

Until the manifest exists, the checkpoint does not. The buffer names the one that a resume starts from.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import delete_incomplete, sha256_of_file
from tba.wire import StoredObject
from tba_trainer.learner import Learner
from tba_trainer.model import load_tensors, snapshot

MANIFEST, STATE = "manifest.json", "state.json"
MODEL, OPTIMIZER, REFERENCE, REF_LOGPROBS = (
    "model.safetensors",
    "optimizer.safetensors",
    "reference.safetensors",
    "ref_logprobs.safetensors",
)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainerState(_Document):
    """state.json. Schedules are functions of the step, so the step is their position."""

    schema_version: Literal[1] = 1
    run: str
    version: str
    train_s: float
    num_rollouts_trained: int
    reference_version: str
    rng: dict[str, Any]
    torch_rng: str
    config_sha256: str
    model_config_sha256: str
    policy_temperature: float


class CheckpointManifest(_Document):
    """manifest.json."""

    schema_version: Literal[1] = 1
    run: str
    version: str
    objects: list[StoredObject]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint in memory: tensors by file name, and the rest."""

    state: TrainerState
    tensors: dict[str, dict[str, Tensor]]


def capture(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """The learner's tensors by file name, as CPU copies."""
    files = {
        MODEL: snapshot(learner.model),
        OPTIMIZER: learner.optimizer.state_tensors(),
        REF_LOGPROBS: learner.reference.cache_tensors(),
    }
    if not learner.reference.is_start:
        files[REFERENCE] = learner.reference.tensors()
    return files


def restore(learner: Learner, checkpoint: Checkpoint) -> None:
    """Put the learner, which holds the starting model, where the checkpoint was taken.

    Raises:
        TbaError: the tensors are not those of this model.
    """
    state, tensors = checkpoint.state, checkpoint.tensors
    load_tensors(learner.model, tensors[MODEL], what=f"checkpoint {state.version}")
    learner.optimizer.load_state_tensors(tensors[OPTIMIZER])
    if REFERENCE in tensors:
        learner.reference.load(tensors[REFERENCE], PolicyVersion.parse(state.reference_version))
    learner.reference.load_cache(tensors[REF_LOGPROBS])
    learner.rng.bit_generator.state = state.rng
    torch.set_rng_state(decode_torch_rng(state.torch_rng))


def encode_torch_rng() -> str:
    """torch's random state as base64 text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def decode_torch_rng(text: str) -> Tensor:
    """The opposite of `encode_torch_rng`."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())


class Checkpoints:
    """The checkpoints of one run in one store."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store, self._run = store, run
        self._prefix = f"runs/{run}/checkpoints/"

    def key(self, version: PolicyVersion) -> str:
        """Key of the checkpoint of a version, whether there is one or not."""
        return f"{self._prefix}{version}"

    def save(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, manifest last; returns its key. Writing it again is harmless.

        Raises:
            StoreUnavailableError
        """
        key = self.key(PolicyVersion.parse(checkpoint.state.version))
        objects = []
        for name, tensors in checkpoint.tensors.items():
            with tempfile.TemporaryDirectory(prefix="tba-checkpoint-") as folder:
                path = Path(folder) / name
                save_file(tensors, path)
                objects.append(self._put(key, path))
        with tempfile.TemporaryDirectory(prefix="tba-checkpoint-") as folder:
            path = Path(folder) / STATE
            path.write_text(json.dumps(checkpoint.state.model_dump(), indent=1))
            objects.append(self._put(key, path))
        manifest = CheckpointManifest(run=self._run, version=checkpoint.state.version, objects=objects)
        self._store.put(f"{key}/{MANIFEST}", manifest.model_dump_json(indent=1).encode())
        return key

    def load(self, key: str) -> Checkpoint:
        """Read a checkpoint, every digest verified.

        Raises:
            ObjectNotFoundError: it does not exist or was written by half.
            DigestError, MalformedError: it is damaged.
        """
        try:
            manifest = CheckpointManifest.model_validate_json(self._store.get(f"{key}/{MANIFEST}"))
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"the run's checkpoint {key} is not in {self._store.url}; is store.url the one that the run began with?"
            ) from None
        except ValidationError as error:
            raise MalformedError(f"{key}/{MANIFEST} is not a checkpoint manifest: {error.errors()[0]['msg']}") from None
        tensors: dict[str, dict[str, Tensor]] = {}
        state: TrainerState | None = None
        for stored in manifest.objects:
            with self._verified(stored) as path:
                if stored.name == STATE:
                    state = _read_state(path)
                else:
                    tensors[stored.name] = load_file(path)
        missing = {MODEL, OPTIMIZER, REF_LOGPROBS} - tensors.keys()
        if state is None or missing:
            raise MalformedError(f"checkpoint {key} lacks {', '.join(sorted(missing)) or STATE}")
        return Checkpoint(state=state, tensors=tensors)

    def versions(self) -> list[PolicyVersion]:
        """Every complete checkpoint, oldest first."""
        names = [key.removeprefix(self._prefix).split("/") for key in self._store.list(self._prefix)]
        return sorted(PolicyVersion.parse(name[0]) for name in names if name[1:] == [MANIFEST])

    def delete_all_but(self, keep: int, *, registered: PolicyVersion) -> None:
        """Delete the oldest checkpoints beyond `keep`, manifest first, never the registered one."""
        existing = self.versions()
        for version in existing[: max(0, len(existing) - keep)]:
            if version != registered:
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

    @contextmanager
    def _verified(self, stored: StoredObject) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="tba-checkpoint-") as folder:
            path = Path(folder) / stored.name
            self._store.get_file(stored.key, path)
            found = sha256_of_file(path)
            if found != stored.sha256:
                raise DigestError(
                    f"object {stored.key} in {self._store.url} is damaged: sha256 {found}, the checkpoint's manifest "
                    f"says {stored.sha256}"
                )
            yield path


def _read_state(path: Path) -> TrainerState:
    try:
        return TrainerState.model_validate(json.loads(path.read_text()))
    except (ValidationError, json.JSONDecodeError) as error:
        raise MalformedError(f"the checkpoint's {STATE} cannot be read: {error}") from None
