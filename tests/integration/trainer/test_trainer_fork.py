"""A trainer that starts from a version of another run, over a recorded buffer and a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.checkpoints.checkpoint import CheckpointStore
from tba_trainer.loop.startup import wait_for_origin
from tba_trainer.trainer import train

from tba.api import OriginInfo, RunInfo
from tba.config import Recipe
from tba.errors import ConfigError, ConflictError, DigestError, TbaError, WaitTimeoutError
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Batch, RefLogprob
from tests.support.rollout_values import replace
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import RecordedBuffer, make_batch, make_recipe

TRAINED = {"num_steps": 8, "sync_interval": 2, "checkpoint_interval": 4, "learning_rate": {"value": 1e-4}}


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FileStore, RecordedBuffer]:
    """Run `demo`: 8 steps, checkpoints of 1-4 and 1-8; 1-2 to 1-8 are deltas alone, each against the one before."""
    store, buffer = FileStore(tmp_path_factory.mktemp("trained")), RecordedBuffer()
    start(fork_recipe(model, "demo"), buffer, store)
    versions = WeightVersions(store, "demo")
    assert [versions.manifest(version).is_full for version in versions.versions()] == [True, False, False, False, False]
    return store, buffer


def objective() -> dict[str, Any]:
    return {"preset": "tba_prime", "reference_reset_steps": 3, "beta": {"value": 0.1}}


def start(recipe: Recipe, buffer: RecordedBuffer, store: FileStore) -> None:
    train(recipe, buffer=buffer, store=store, stop=threading.Event())  # pyright: ignore[reportArgumentType]


def fork_recipe(model: Path, run: str, **sections: dict[str, Any]) -> Recipe:
    trainer = {**TRAINED, **sections.pop("trainer", {})}
    run_section, model_section = {"name": run}, {"dtype": "bfloat16"}
    sections = {"objective": objective(), **sections}
    return make_recipe(model, run=run_section, model=model_section, trainer=trainer, **sections)


def carrying_batch(seed: int) -> Batch:
    """A batch whose rollouts carry ref log-probs of the starting model."""
    batch = make_batch(seed)
    ref = RefLogprob.of(-7.5, PolicyVersion(0, 0))
    return replace(
        batch,
        groups=tuple(
            replace(group, rollouts=tuple(replace(rollout, ref_logprob=ref) for rollout in group.rollouts))
            for group in batch.groups
        ),
    )


def forked(version: str | None, store: FileStore, batches: Callable[[int], Batch] = make_batch) -> RecordedBuffer:
    """The buffer of a run that began with the rollouts of `demo`, whose last lineage is 1."""
    buffer = RecordedBuffer(batches)
    buffer.lineage, buffer.parents = 1, {1: "0-0"}
    buffer.origin = OriginInfo(
        source="demo/end",
        version=version,
        state="complete",
        lineage=1,
        start_params_sha256=WeightVersions(store, "demo").manifest(PolicyVersion(0, 0)).params_sha256,
    )
    return buffer


def tensors(store: FileStore, run: str, version: str, folder: Path) -> dict[str, torch.Tensor]:
    weights = WeightVersions(store, run).download_tensors(PolicyVersion.parse(version), folder / f"{run}-{version}")
    return load_file(weights.paths[0])


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_fork_of_a_checkpoint_is_bit_for_bit_the_run_that_continued(
    trained: tuple[FileStore, RecordedBuffer], model: Path, tmp_path: Path
) -> None:
    store, old = trained
    buffer = forked("1-4", store)
    start(fork_recipe(model, "fork"), buffer, store)
    assert buffer.parents == {1: "0-0", 2: "1-4"}
    assert buffer.marks == ["2-4", "2-6", "2-8"]
    assert [(lineage, step) for lineage, step, _ in buffer.acks] == [(2, step) for step in range(5, 9)]
    losses = [[ack.metrics["loss"] for _, step, ack in b.acks if step > 4] for b in (old, buffer)]
    assert losses[0] == losses[1]
    assert same(tensors(store, "demo", "1-8", tmp_path), tensors(store, "fork", "2-8", tmp_path))
    assert buffer.evals.keys() >= {"eval-2-4", "eval-2-8"}
    assert "eval-0-0" not in buffer.evals
    assert [
        str(version) for version in CheckpointStore(store, "fork", folder=tmp_path, max_bytes=10**9).versions()
    ] == [
        "2-5",
        "2-8",
    ], "soon one of its own"


def test_a_fork_of_a_version_without_a_checkpoint_takes_its_weights(
    trained: tuple[FileStore, RecordedBuffer], model: Path, tmp_path: Path
) -> None:
    store, _ = trained
    buffer = forked("1-6", store)
    start(fork_recipe(model, "light"), buffer, store)
    assert buffer.marks == ["2-6", "2-8"]
    assert same(tensors(store, "demo", "1-6", tmp_path), tensors(store, "light", "2-6", tmp_path))
    assert not same(tensors(store, "light", "2-6", tmp_path), tensors(store, "light", "2-8", tmp_path))
    assert WeightVersions(store, "light").manifest(PolicyVersion(2, 6)).parent == "1-6"


def test_a_fork_whose_searchers_hold_the_starting_model_stores_it_without_announcing_it(
    model: Path, tmp_path: Path
) -> None:
    store = FileStore(tmp_path)
    start(fork_recipe(model, "demo", objective={"preset": "tb"}), RecordedBuffer(), store)
    versions, start_version = WeightVersions(store, "held"), PolicyVersion(0, 0)
    buffer = forked("1-4", store, carrying_batch)
    for marks in (["2-4", "2-6", "2-8"], ["2-4", "2-6", "2-8", "3-8"]):  # a restart finds it there
        buffer.state = "running"
        held = {"preset": "tb", "reference_placement": "searcher"}
        start(fork_recipe(model, "held", objective=held), buffer, store)
        assert buffer.marks == marks
        manifest = versions.manifest(start_version)
        assert manifest.params_sha256 == WeightVersions(store, "demo").manifest(start_version).params_sha256


def test_a_fork_that_stops_early_starts_from_its_version_again(
    trained: tuple[FileStore, RecordedBuffer], model: Path
) -> None:
    store, _ = trained
    buffer = forked("1-4", store)

    def before(method: str) -> None:
        if method == "ack":
            raise TbaError("killed")

    buffer.before = before
    with pytest.raises(TbaError, match="killed"):
        start(fork_recipe(model, "again"), buffer, store)
    assert buffer.checkpoint is None
    buffer.before = lambda method: None
    start(fork_recipe(model, "again"), buffer, store)
    assert buffer.parents == {1: "0-0", 2: "1-4", 3: "1-4"}
    assert buffer.marks == ["2-4", "3-4", "3-6", "3-8"]
    assert "eval-3-4" in buffer.evals


def test_a_version_that_is_not_there_and_a_damaged_one_are_refused_before_a_lineage_is_taken(
    trained: tuple[FileStore, RecordedBuffer], model: Path
) -> None:
    store, _ = trained
    buffer = forked("1-5", store)
    with pytest.raises(ConfigError, match="forked from version 1-5 of run 'demo', which is not in"):
        start(fork_recipe(model, "refused"), buffer, store)
    (key,) = (key for key in store.list("runs/demo/weights/1-2/") if "/delta-" in key)
    whole = store.get(key)
    store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    damaged = forked("1-2", store)
    with pytest.raises(DigestError, match=key):
        start(fork_recipe(model, "refused"), damaged, store)
    store.put(key, whole)
    assert (buffer.lineage, damaged.lineage) == (1, 1)


@pytest.mark.parametrize("version", ["1-4", None])
def test_another_starting_model_than_that_of_the_snapshot_is_refused(
    trained: tuple[FileStore, RecordedBuffer], tmp_path: Path, version: str | None
) -> None:
    store, _ = trained
    buffer = forked(version, store)
    other = make_tiny_model(tmp_path / "other", seed=1, hidden_size=32)
    with pytest.raises(ConfigError, match="is not the model that run 'demo' of snapshot"):
        start(fork_recipe(other, "refused"), buffer, store)
    assert buffer.lineage == 1


def test_a_run_that_begins_with_rollouts_alone_starts_from_the_starting_model(
    trained: tuple[FileStore, RecordedBuffer], model: Path
) -> None:
    store, _ = trained
    buffer = forked(None, store)
    start(fork_recipe(model, "offline", trainer={"num_steps": 2}, searcher={"num_searchers": 0}), buffer, store)
    assert buffer.parents == {1: "0-0", 2: "0-0"}
    assert buffer.marks == ["0-0", "2-2"]
    assert buffer.evals == {}, "nobody could do them"
    assert buffer.state == "done"


class LoadingBuffer(RecordedBuffer):
    """Its snapshot is loaded once it was asked so often."""

    def __init__(self, asked: int, state: Any = "complete") -> None:
        super().__init__()
        self._left, self._state = asked, state

    def run(self) -> RunInfo:
        self._left -= 1
        state, reason = ("loading", None) if self._left >= 0 else (self._state, "it is damaged")
        self.origin = OriginInfo(source="demo/end", version=None, state=state, reason=reason)
        return super().run()


def test_the_trainer_waits_for_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_trainer.loop.startup._POLL_S", 0.01)
    never = threading.Event()
    origin = wait_for_origin(LoadingBuffer(3), wait_s=60, stop=never)  # pyright: ignore[reportArgumentType]
    assert origin is not None
    assert origin.state == "complete"
    with pytest.raises(ConflictError, match="demo/end, which this run begins with, was not loaded: it is damaged"):
        wait_for_origin(LoadingBuffer(3, "failed"), wait_s=60, stop=never)  # pyright: ignore[reportArgumentType]
    begun = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"not loaded within 0\.1 s"):
        wait_for_origin(LoadingBuffer(10**9), wait_s=0.1, stop=never)  # pyright: ignore[reportArgumentType]
    assert time.monotonic() >= begun + 0.1
