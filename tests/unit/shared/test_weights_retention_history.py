"""Whatever happens to a run, retention leaves every version whole that something holds."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import DeltaSettings, LocalVersion, WeightVersions
from tba.weights.retention import reasons_to_keep
from tba.wire import Canary
from tests.support.history_values import run_info, searcher

KEEP = 2
DELTAS = DeltaSettings(keyframe_interval=5, max_share=100.0)
"""For tensors of a few bytes, whose deltas are larger than they are."""
ACTIONS = ("publish", "publish", "publish", "whole", "resume", "zombie", "checkpoint", "beat", "best", "delete")


class History:
    """A run as store and buffer know it; every action picks from what is there by a number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions = WeightVersions(FileStore(folder / "store"), "demo")
        (folder / "config.json").write_text("{}")
        self.lineage, self.step = 1, 0
        self.parents = {1: START}
        self.base: LocalVersion | None = None
        self.zombie: LocalVersion | None = None
        """The last version of a trainer that was replaced, and does not know it."""
        self.announced: dict[PolicyVersion, int] = {}
        """Version -> the value of its tensors."""
        self.checkpoints: list[PolicyVersion] = []
        self.held: dict[str, PolicyVersion] = {}
        self.num_written = 0
        self.publish(0)

    def act(self, action: str, number: int) -> None:
        """Do what the action says; `number` decides which version it is about."""
        announced = [version for version in self.versions.versions() if version in self.announced]
        chosen = announced[number % len(announced)]
        match action:
            case "beat" | "best":
                self.held[f"{action}-{number % 2}"] = chosen
            case "checkpoint":
                self.checkpoints = [*self.checkpoints[-1:], max(announced)]
            case "delete":
                self.delete(number % 4)
            case "resume":
                self.resume(number)
            case "zombie" if self.zombie is not None:
                last = self.zombie.version
                self.zombie = self._write(PolicyVersion(last.lineage, last.step + 1), self.zombie)
            case "publish" | "whole":
                self.base = None if action == "whole" else self.base
                self.publish(self.step + 1)

    def publish(self, step: int) -> None:
        """Write and announce the next version, the first one as 0-0."""
        self.step = step
        version = PolicyVersion(self.lineage, step) if self.announced else START
        self.base = self._write(version, self.base)
        self.announced[version] = self.num_written

    def resume(self, number: int) -> None:
        """Begin a lineage at a checkpoint, or at the start, and announce its weights."""
        places = [START, *self.checkpoints]
        parent = places[number % len(places)]
        self.lineage, self.zombie, self.base = self.lineage + 1, self.base, None
        self.parents[self.lineage] = parent
        self.publish(parent.step)

    def delete(self, num_before_kill: int) -> None:
        """Delete as the trainer does, which is killed after some deletions; 0: it is not."""
        names = {name: str(version) for name, version in self.held.items()}
        best = {"metric": "accuracy", "value": 0.5, "num_prompts": 4, "num_samples": 1}
        info = run_info(
            step=self.step,
            lineage=self.lineage,
            parents={lineage: str(parent) for lineage, parent in self.parents.items()},
            latest_version=str(list(self.announced)[-1]),
            components=[searcher(name, version) for name, version in names.items() if name.startswith("beat")],
            best={"version": names["best-0"], **best} if "best-0" in names else None,
        )
        existing = self.versions.versions()
        kept = reasons_to_keep(existing, info, self.checkpoints, keep=KEEP, needed_by=self.versions.needed_by)
        for version in sorted(set(existing) - kept.keys(), reverse=True)[: num_before_kill or None]:
            self.versions.delete(version)
        self._check()

    def _check(self) -> None:
        left = set(self.versions.versions())
        held = [*self.checkpoints, *(v for name, v in self.held.items() if name != "best-1")]
        assert left >= {START, list(self.announced)[-1], *held, *sorted(left)[-KEEP:]}
        again = WeightVersions(FileStore(self.folder / "store"), "demo")
        for version in left & self.announced.keys():
            with tempfile.TemporaryDirectory(dir=self.folder) as name:
                local = again.download_tensors(version, Path(name))
                assert int(load_file(local.paths[0])["a"][0]) == self.announced[version]

    def _write(self, version: PolicyVersion, base: LocalVersion | None) -> LocalVersion:
        self.num_written += 1
        path = self.folder / f"files-{self.num_written}" / "model.safetensors"
        path.parent.mkdir()
        save_file({"a": np.full(4, self.num_written, np.int32), "b": np.zeros(4, np.int32)}, path)
        manifest = self.versions.publish(
            version=version,
            parent=None if version == START else START,
            dtype="float32",
            tensors_paths=[path],
            files={"config.json": self.folder / "config.json"},
            canary=Canary(prompt_tokens=[1], response_tokens=[2], logprobs=[-0.5], tolerance=1e-3),
            torch_version="2",
            transformers_version="5",
            base=base,
            deltas=DELTAS,
        )
        return LocalVersion(version, (path,), manifest)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000)), min_size=10, max_size=30))
def test_after_any_history_every_announced_version_that_is_left_can_be_assembled(
    actions: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        history = History(Path(name))
        for action, number in actions:
            history.act(action, number)
        history.delete(0)
