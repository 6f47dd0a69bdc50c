"""Trainer runs in this process, with a recorded buffer and a real store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.trainer import train

from tba.config import Recipe
from tba.errors import StoreUnavailableError, TbaError
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tests.support.trainer_values import RecordedBuffer


class World:
    """A run: its buffer, its store, and trainers that start one after another."""

    def __init__(self, folder: Path, *, store: FileStore | None = None, run: str = "demo") -> None:
        self.buffer = RecordedBuffer()
        self.store = store or FileStore(folder / "store")
        self.folder, self.run = folder, run
        self.versions = WeightVersions(self.store, run)
        self.stop = threading.Event()

    def train(self, recipe: Recipe) -> None:
        self.stop.clear()
        train(recipe, buffer=self.buffer, store=self.store, stop=self.stop)  # pyright: ignore[reportArgumentType]

    def at(
        self, method: str, action: Callable[[], object], *, step: int | None = None, lineage: int | None = None
    ) -> None:
        """Call `action` before each call of the buffer's `method` while the buffer is at this step and lineage."""

        def before(called: str) -> None:
            if called == method and step in (None, self.buffer.step) and lineage in (None, self.buffer.lineage):
                action()

        self.buffer.before = before

    def train_until_killed(self, recipe: Recipe, method: str, **when: int) -> None:
        """Train until a call of the buffer's `method`, which raises and so ends the trainer; later trainers go on."""
        self.at(method, raising(TbaError("killed")), **when)
        with pytest.raises(TbaError, match="killed"):
            self.train(recipe)
        self.buffer.before = lambda method: None

    def tensors(self, version: str) -> dict[str, torch.Tensor]:
        return load_file(self.versions.download_tensors(PolicyVersion.parse(version), self.folder / version).paths[0])

    def stop_after(self, step: int) -> None:
        """Set the stop event once, as SIGTERM does, when the trainer acks step `step`."""

        def before(method: str) -> None:
            if method == "ack" and self.buffer.step == step - 1:
                self.stop.set()
                self.buffer.before = lambda method: None

        self.buffer.before = before

    def checkpoints(self) -> list[str]:
        """Return the versions whose checkpoints are complete in the store."""
        keys = self.store.list(f"runs/{self.run}/checkpoints/")
        return sorted(key.split("/")[3] for key in keys if key.endswith("/manifest.json"))

    def waits(self) -> set[str]:
        """The waits that a heartbeat has named."""
        return {beat.wait.name for beat in self.buffer.beats if beat.wait is not None}

    def skipped(self) -> dict[int, str | None]:
        """Return for each acked step why its batch was skipped; None if it was used."""
        return {step: ack.skipped for _, step, ack in self.buffer.acks}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether `b` has all tensors of `a` with exactly equal values."""
    return all(torch.equal(a[name], b[name]) for name in a)


def at_put(patch: pytest.MonkeyPatch, action: Callable[[str, Path], object]) -> None:
    """Patch FileStore to call `action` with key and path before it stores a file; `action` may raise."""
    put_file = FileStore.put_file

    def put(store: FileStore, key: str, path: Path, *, create_only: bool = False) -> None:
        action(key, path)
        put_file(store, key, path, create_only=create_only)

    patch.setattr(FileStore, "put_file", put)


def refuse_puts(patch: pytest.MonkeyPatch, when: Callable[[str], bool]) -> None:
    """Let the store be away for every file whose key is such a one."""

    def refuse(key: str, _: Path) -> None:
        if when(key):
            raise StoreUnavailableError("the store is away")

    at_put(patch, refuse)


def raising(error: Exception) -> Callable[[], None]:
    """Return a function that raises the error."""

    def act() -> None:
        raise error

    return act


def failing(times: int, error: Callable[[], Exception], method: str) -> Callable[[str], None]:
    left = [times]

    def before(called: str) -> None:
        if called == method and left[0] > 0:
            left[0] -= 1
            raise error()

    return before
