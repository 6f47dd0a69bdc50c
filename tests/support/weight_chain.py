"""Chains of weight versions of a little model, and processes that are killed while they publish or download."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tba.config.sections import StoreSection
from tba.store import ObjectStore, open_store
from tba.versions import START, PolicyVersion
from tba.weights import DeltaSettings, LocalVersion, WeightVersions, pulling
from tba.wire import Canary, Manifest

RUN = "demo"
ALWAYS = DeltaSettings(keyframe_interval=1000, max_share=10.0)
"""Settings with which every version that has a base is published as a delta."""
CANARY = Canary(prompt_tokens=[1, 2], response_tokens=[3, 4], logprobs=[-0.5, -1.25], tolerance=1e-3)
Tensors = dict[str, NDArray[Any]]


def version(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def tensors_of(step: int, *, seed: int = 0) -> Tensors:
    """Return the tensors of a step. A float32 and a float16 tensor change a little each step, and one stays the same.
    Another one exists only in steps 2 and 3, with two shapes."""
    rng = np.random.default_rng(seed)
    weights, half = rng.standard_normal((64, 33), np.float32), rng.standard_normal(2000).astype(np.float16)
    for _ in range(step):
        weights[rng.integers(0, 64, 20), rng.integers(0, 33, 20)] += np.float32(1e-3)
        half.view(np.uint16)[rng.integers(0, 2000, 20)] += np.uint16(1)
    tensors: Tensors = {"weights": weights, "half": half, "constant": np.arange(50, dtype=np.float32)}
    if step in (2, 3):
        tensors["passing"] = np.full(step * 10, step, np.float32)
    return tensors


class Chain:
    """Versions 1-0, 1-1, ... of one run; 1-0 is full, every later one a delta against the one before.

    Args:
        folder: each version has its files in a folder of its name here.
        num: versions that are published at once.
    """

    def __init__(self, store: ObjectStore, folder: Path, num: int = 0) -> None:
        self.store, self.folder, self.versions = store, folder, WeightVersions(store, RUN)
        self.local: list[LocalVersion] = []
        self.extend(num)

    def files(self, name: object, tensors: Mapping[str, NDArray[Any]]) -> tuple[Path, dict[str, Path]]:
        """Write the files of a version; return the tensors file, and the other files by name."""
        folder = self.folder / str(name)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "tiny"}')
        return folder / "model.safetensors", {"config.json": folder / "config.json"}

    def publish(
        self,
        step: int,
        *,
        base: LocalVersion | None = None,
        tensors: Mapping[str, NDArray[Any]] | None = None,
        deltas: DeltaSettings = ALWAYS,
    ) -> Manifest:
        """Publish version 1-<step> and add it to `local`; return its manifest."""
        path, files = self.files(version(step), tensors_of(step) if tensors is None else tensors)
        manifest = publish(self.versions, step, path, files, base, deltas)
        self.local.append(LocalVersion(version(step), (path,), manifest))
        return manifest

    def extend(self, num: int, *, deltas: DeltaSettings = ALWAYS) -> list[Manifest]:
        """Publish the next `num` versions."""
        steps = range(len(self.local), len(self.local) + num)
        return [self.publish(step, base=self.local[-1] if self.local else None, deltas=deltas) for step in steps]


def publish(
    versions: WeightVersions,
    step: int,
    path: Path,
    files: Mapping[str, Path],
    base: LocalVersion | None,
    deltas: DeltaSettings = ALWAYS,
) -> Manifest:
    """Publish version 1-<step> from these files."""
    return publish_files(versions, version(step), [path], files, base=base, deltas=deltas)


def publish_files(
    versions: WeightVersions, version: PolicyVersion, tensors_paths: Any, files: Mapping[str, Path], **changes: Any
) -> Manifest:
    """Publish a float32 version with the parent 0-0; `changes` override the arguments of `publish`."""
    new: dict[str, Any] = {
        "parent": START,
        "dtype": "float32",
        "canary": CANARY,
        "torch_version": "2.13.0",
        "transformers_version": "5.19.0",
        **changes,
    }
    return versions.publish(version=version, tensors_paths=tensors_paths, files=files, **new)


def flip(store: ObjectStore, key: str) -> bytes:
    """Flip a bit of a stored object; return its new bytes."""
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    return bytes(data)


class DyingStore:
    """A store that reaches a point of `points` before each call, so that its process can be killed there."""

    def __init__(self, store: ObjectStore, points: Points) -> None:
        self._store, self._points = store, points
        self.url = store.url

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def call(*args: Any, **options: Any) -> Any:
            self._points.reach()
            return method(*args, **options)

        return call


class Points:
    """Counts the points at which the process can be killed; SIGKILLs the process at point `die_at` (from 0)."""

    def __init__(self, die_at: int | None) -> None:
        self.num, self._die_at, self._lock = 0, die_at, threading.Lock()

    def reach(self) -> None:
        """Kill the process if this is point `die_at`; else count the point."""
        with self._lock:
            if self.num == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.num += 1

    def before(self, module: Any, name: str) -> None:
        """Patch a function of a module so that each call first reaches a point."""
        function = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            self.reach()
            return function(*args, **options)

        setattr(module, name, call)


def act_and_die(
    action: str, section: dict[str, Any], environ: dict[str, str], folder: str, step: int, die_at: int | None
) -> None:
    """Publish or download version 1-<step>, and die at point `die_at`; else exit with the number of points as code.

    A test runs it in a separate process.

    Args:
        action: publish: the files in `folder`/1-<step>, with the version before as base; download: into `folder`.
    """
    os.environ |= environ
    points = Points(die_at)
    store = open_store(StoreSection(**section))
    versions = WeightVersions(cast(ObjectStore, DyingStore(store, points)), RUN)
    points.before(os, "replace")
    points.before(os, "link")
    if action == "publish":
        path, before = Path(folder) / str(version(step)), Path(folder) / str(version(step - 1))
        manifest = WeightVersions(store, RUN).manifest(version(step - 1))
        base = LocalVersion(version(step - 1), (before / "model.safetensors",), manifest)
        publish(versions, step, path / "model.safetensors", {"config.json": path / "config.json"}, base)
    else:
        points.before(pulling, "apply_tensor")
        versions.download_tensors(version(step), Path(folder))
    points.reach()
    os._exit(points.num)
