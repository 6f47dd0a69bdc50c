"""Checkpoints of supervised training: a folder beside the one that is made, `.NAME.checkpoint/STEP/`.

    model-00001.safetensors      the trained parameters, whole tensors in float32; more files as needed
    optimizer-00001.safetensors  AdamW's moments
    state.json                   settings, digests of the examples and of the base's origin, step, curve, time

Weights, moments and the step are all that the next step depends on: the order of the examples is a function of the
step, and nothing random happens after the start.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from tba.errors import ConfigError, TbaError
from tba.store.file import explain_no_locks
from tba_trainer.checkpoints.weight_files import SUFFIX, TensorFiles, write_tensor_files
from tba_trainer.learner.learner import MODEL, OPTIMIZER, Optimizer
from tba_trainer.model.parameters import trainable, whole_tensors
from tba_trainer.model.policy import load_tensors

STATE = "state.json"


class TrainingState(BaseModel):
    """state.json."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    """`deciding()` of the section."""
    examples_sha256: str
    base_origin: str | None = None
    """`origin_digest` of the base."""
    step: int = 0
    """Optimizer steps that are made."""
    curve: list[dict[str, float]] = []
    losses: list[float] = []
    """Of the steps after the last point of the curve."""
    wall_s: float = 0.0
    cpu_s: float = 0.0


class Checkpoints:
    """The checkpoints of one folder that is made; only the newest is kept.

    Args:
        out: the folder that is made.
        max_bytes: of tensors in one file.
        is_leader: whether this process writes; the others of a sharded model only gather.
    """

    def __init__(self, out: Path, *, max_bytes: int, is_leader: bool) -> None:
        self._folder = out.with_name(f".{out.name}.checkpoint")
        self.half_made = self._folder / "out"
        """Where the folder that is made is written, before it gets its name."""
        self._out, self._max_bytes, self._is_leader = out, max_bytes, is_leader

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainings of the same folder out.

        Raises:
            ConfigError: there is one, or the file system has no locks.
        """
        if not self._is_leader:
            yield
            return
        busy = ConfigError(f"another process makes {self._out} now; wait until it has ended")
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            try:
                # the kernel releases this lock when the process is gone, whatever ended it
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy from None
            except OSError as error:
                raise ConfigError(explain_no_locks(self._folder, error)) from None
            # the other one has deleted the folder since it was opened: a third could lock the next one
            if os.fstat(descriptor).st_nlink == 0:
                raise busy
            try:
                yield
            finally:
                with suppress(OSError):  # it holds a checkpoint, or is deleted
                    self._folder.rmdir()
        finally:
            os.close(descriptor)

    def save(self, model: Any, optimizer: Optimizer, state: TrainingState) -> None:
        """Write a checkpoint, then delete the older one. Every process of a sharded model calls it.

        Raises:
            OSError: the disk is full.
        """
        sections = {MODEL: whole_tensors(trainable(model)), OPTIMIZER: whole_tensors(optimizer.state_tensors())}
        if not self._is_leader:
            for tensors in sections.values():
                for _ in tensors:
                    pass
            return
        half_made = self._folder / "half-made"
        shutil.rmtree(half_made, ignore_errors=True)
        half_made.mkdir(parents=True)
        for stem, tensors in sections.items():
            list(write_tensor_files(tensors, half_made, stem=stem, max_bytes=self._max_bytes))
        (half_made / STATE).write_text(state.model_dump_json(indent=1), encoding="utf-8")
        older = self._complete()
        target = self._folder / f"{state.step:09d}"
        if target in older:  # the same step of the same training has the same content
            shutil.rmtree(half_made)
            return
        half_made.rename(target)
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)

    def restore(self, model: Any, optimizer: Optimizer, fresh: TrainingState) -> TrainingState:
        """Load the newest checkpoint into model and optimizer; return its state, or `fresh` where there is none.

        Args:
            fresh: the state at the beginning.

        Raises:
            ConfigError: the checkpoint is of other settings or examples, or is damaged.
        """
        for folder in reversed(self._complete()):
            try:
                state = TrainingState.model_validate(json.loads((folder / STATE).read_bytes()))
                self._check(fresh, state)
                paths = sorted(folder.glob(f"*{SUFFIX}"))
                files = {
                    stem: TensorFiles([p for p in paths if p.name.startswith(f"{stem}-")])
                    for stem in (MODEL, OPTIMIZER)
                }
                load_tensors(trainable(model), files[MODEL], what=f"checkpoint {folder}")
                optimizer.load_state_tensors(files[OPTIMIZER])
            except ConfigError:
                raise
            except (OSError, ValueError, ValidationError, SafetensorError, TbaError) as error:
                raise ConfigError(
                    f"the checkpoint {folder} is damaged ({str(error).splitlines()[0]}); delete {self._folder} to "
                    "begin anew"
                ) from None
            return state
        return fresh

    def delete(self) -> None:
        """Delete everything: the folder is made."""
        if self._is_leader:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return sorted(path for path in self._folder.glob("[0-9]*") if path.is_dir())

    def _check(self, fresh: TrainingState, found: TrainingState) -> None:
        what = f"training that was interrupted has left {self._folder}"
        then = f"undo that to go on from step {found.step}, or delete {self._folder} to begin anew"
        for key in sorted(fresh.settings.keys() | found.settings.keys()):
            now, before = fresh.settings.get(key), found.settings.get(key)
            if now != before:
                raise ConfigError(f"{what}: it was begun with {key} = {before!r}, and the recipe has {now!r}; {then}")
        if found.examples_sha256 != fresh.examples_sha256:
            raise ConfigError(f"{what}: it was begun with other examples; {then}")
        if found.base_origin != fresh.base_origin:
            raise ConfigError(f"{what}: its base has been trained anew since; {then}")
