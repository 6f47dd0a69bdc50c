"""Which weight versions are deleted, and why the others stay; after any history all that is held is whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tba.api import BestVersion
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import DeltaSettings, LocalVersion, WeightVersions
from tba.weights.retention import reasons_to_keep
from tests.support.history_values import evaluation, run_info, searcher
from tests.support.weight_chain import publish_files

INFO = run_info(
    step=60,
    lineage=3,
    parents={1: "0-0", 2: "1-8", 3: "2-20"},
    latest_version="3-60",
    components=[searcher("searcher-here", "3-24"), searcher("searcher-gone", "3-28", alive=False)],
    evals=[evaluation("3-32", None, "pending"), evaluation("3-36", None, "done")],
    best=BestVersion(version="3-40", metric="accuracy", value=0.5, num_prompts=4, num_samples=1),
)
VERSIONS = [START, PolicyVersion(1, 4), PolicyVersion(1, 8), PolicyVersion(2, 8), PolicyVersion(2, 20)]
VERSIONS += [PolicyVersion(3, step) for step in range(20, 61, 4)]
WHOLE: dict[str, Any] = {"needed_by": set}
"""Every version is stored whole."""
CHECKPOINTS = [PolicyVersion(2, 20), PolicyVersion(3, 48)]


def deleted_of(versions: list[PolicyVersion], *args: Any, **arguments: Any) -> list[PolicyVersion]:
    kept = reasons_to_keep(versions, *args, **arguments)
    return [version for version in sorted(versions) if version not in kept]


def test_versions_that_something_holds_are_never_deleted() -> None:
    deleted = deleted_of(VERSIONS, INFO, CHECKPOINTS, keep=2, **WHOLE)
    assert [str(v) for v in deleted] == ["1-4", "2-8", "3-20", "3-28", "3-36", "3-44", "3-52"]
    assert deleted_of(VERSIONS, INFO, CHECKPOINTS, keep=100, **WHOLE) == []
    lagging = INFO.model_copy(update={"sampling_version": "3-40"})
    deleted = deleted_of(VERSIONS, lagging, CHECKPOINTS, keep=2, **WHOLE)
    assert [str(v) for v in deleted] == ["1-4", "2-8", "3-20", "3-28"]
    without = INFO.model_copy(update={"best": None})
    assert PolicyVersion(3, 40) in deleted_of(VERSIONS, without, CHECKPOINTS, keep=2, **WHOLE)


def test_everything_that_a_kept_version_is_assembled_from_is_kept_and_why_is_said() -> None:
    chain = {step: PolicyVersion(3, step - 4) for step in (60, 56, 48, 44, 40, 36, 28)}  # full: 3-52, 3-32, 3-24

    def needed_by(held: Iterable[PolicyVersion]) -> set[PolicyVersion]:
        found = set(held)
        for version in held:
            while version.lineage == 3 and version.step in chain:
                version = chain[version.step]
                found.add(version)
        return found

    arguments = {"keep": 2, "needed_by": needed_by}
    reasons = reasons_to_keep(VERSIONS, INFO, CHECKPOINTS, **arguments)
    assert {str(version): why for version, why in reasons.items()} == {
        "3-60": ["among the newest 2", "latest"],
        "3-56": ["among the newest 2", "needed by 3-60"],
        "3-52": ["needed by 3-60"],
        "3-48": ["checkpoint"],
        "3-44": ["needed by 3-48"],
        "3-40": ["best", "needed by 3-48"],
        "3-36": ["needed by 3-48"],
        "3-32": ["evaluation in progress", "needed by 3-48"],
        "3-24": ["held by searcher-here"],
        "2-20": ["checkpoint", "parent of lineage 3"],
        "1-8": ["parent of lineage 2"],
        "0-0": ["starting model"],
    }
    deleted = deleted_of(VERSIONS, INFO, CHECKPOINTS, **arguments)
    assert [str(v) for v in deleted] == ["1-4", "2-8", "3-20", "3-28"]
    # a version that is gone holds nothing, and of a run that is over only what the store knows is held
    gone = [version for version in VERSIONS if version != PolicyVersion(3, 48)]
    assert PolicyVersion(3, 44) in deleted_of(gone, INFO, CHECKPOINTS, **arguments)
    over = reasons_to_keep(VERSIONS, None, CHECKPOINTS, **arguments)
    assert {str(version) for version in over} == {"0-0", "2-20", *(f"3-{step}" for step in range(32, 61, 4))}


# ---- Whatever happens to a run, every version that something holds stays whole ---------------------------------------


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
        parent, files = None if version == START else START, {"config.json": self.folder / "config.json"}
        manifest = publish_files(self.versions, version, [path], files, parent=parent, base=base, deltas=DELTAS)
        return LocalVersion(version, (path,), manifest)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000)), min_size=10, max_size=30))
def test_after_any_history_every_announced_version_that_is_left_can_be_assembled(actions: list) -> None:
    with tempfile.TemporaryDirectory() as name:
        history = History(Path(name))
        for action, number in actions:
            history.act(action, number)
        history.delete(0)
