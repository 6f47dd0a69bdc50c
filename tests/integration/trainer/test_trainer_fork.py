"""A trainer that starts from a version of another run, over a recorded buffer and a real store."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tba_trainer.loop.startup import wait_for_origin

from tba.api import OriginInfo, RunInfo
from tba.config import Recipe
from tba.errors import ConfigError, ConflictError, DigestError, WaitTimeoutError
from tba.versions import START, PolicyVersion
from tba.wire import RefLogprob
from tests.support.rollout_values import replace
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import RecordedBuffer, changed, make_batch, make_recipe
from tests.support.trainer_world import World, same

TRAINED = {"num_steps": 8, "sync_interval": 2, "checkpoint_interval": 4, "learning_rate": {"value": 1e-4}}


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Run `demo`: 8 steps, checkpoints of 1-4 and 1-8; 1-2 to 1-8 are deltas alone, each against the one before."""
    world = World(tmp_path_factory.mktemp("trained"))
    world.train(fork_recipe(model, "demo"))
    versions = [world.versions.manifest(version) for version in world.versions.versions()]
    assert [manifest.is_full for manifest in versions] == [True, False, False, False, False]
    return world


def fork_recipe(model: Path, run: str, **sections: dict[str, Any]) -> Recipe:
    objective = {"preset": "tba_prime", "reference_reset_steps": 3, "beta": {"value": 0.1}}
    sections = {"objective": objective, **sections, "trainer": {**TRAINED, **sections.pop("trainer", {})}}
    return make_recipe(model, run={"name": run}, model={"dtype": "bfloat16"}, **sections)


def forked(folder: Path, trained: World, version: str | None, run: str) -> World:
    """A run that began with the rollouts of `demo`, whose last lineage is 1, in the store of that run."""
    world = World(folder / run, store=trained.store, run=run)
    world.buffer.lineage, world.buffer.parents = 1, {1: "0-0"}
    start = trained.versions.manifest(START).params_sha256
    of_start: dict[str, Any] = {"lineage": 1, "start_params_sha256": start}
    world.buffer.origin = OriginInfo(source="demo/end", version=version, state="complete", **of_start)
    return world


def test_a_fork_of_a_checkpoint_is_the_run_that_continued(trained: World, model: Path, tmp_path: Path) -> None:
    fork = forked(tmp_path, trained, "1-4", "fork")
    fork.train(fork_recipe(model, "fork"))
    buffer = fork.buffer
    assert (buffer.parents, buffer.marks) == ({1: "0-0", 2: "1-4"}, ["2-4", "2-6", "2-8"])
    assert [(lineage, step) for lineage, step, _ in buffer.acks] == [(2, step) for step in range(5, 9)]
    losses = [[ack.metrics["loss"] for _, step, ack in b.acks if step > 4] for b in (trained.buffer, buffer)]
    assert losses[0] == losses[1]
    assert same(trained.tensors("1-8"), fork.tensors("2-8"))
    assert buffer.evals.keys() >= {"eval-2-4", "eval-2-8"}
    assert "eval-0-0" not in buffer.evals
    assert fork.checkpoints() == ["2-5", "2-8"], "soon one of its own"


def test_a_fork_of_a_version_without_a_checkpoint_has_its_weights(trained: World, model: Path, tmp_path: Path) -> None:
    fork = forked(tmp_path, trained, "1-6", "light")
    fork.train(fork_recipe(model, "light"))
    assert fork.buffer.marks == ["2-6", "2-8"]
    assert same(trained.tensors("1-6"), fork.tensors("2-6"))
    assert not same(fork.tensors("2-6"), fork.tensors("2-8"))
    assert fork.versions.manifest(PolicyVersion(2, 6)).parent == "1-6"


def test_a_fork_whose_searchers_hold_the_start_stores_it_without_announcing_it(model: Path, tmp_path: Path) -> None:
    old = World(tmp_path)
    old.train(fork_recipe(model, "demo", objective={"preset": "tb"}))
    fork, ref = forked(tmp_path, old, "1-4", "fork"), RefLogprob.of(-7.5, START)
    fork.buffer.batch_of = lambda step: changed(make_batch(step), lambda _, r: replace(r, ref_logprob=ref))
    for marks in (["2-4", "2-6", "2-8"], ["2-4", "2-6", "2-8", "3-8"]):  # a restart finds it there
        fork.buffer.state = "running"
        fork.train(fork_recipe(model, "fork", objective={"preset": "tb", "reference_placement": "searcher"}))
        assert fork.buffer.marks == marks
        assert fork.versions.manifest(START).params_sha256 == old.versions.manifest(START).params_sha256


def test_a_fork_that_stops_early_starts_from_its_version_again(trained: World, model: Path, tmp_path: Path) -> None:
    fork = forked(tmp_path, trained, "1-4", "again")
    fork.train_until_killed(fork_recipe(model, "again"), "ack")
    assert fork.buffer.checkpoint is None
    fork.train(fork_recipe(model, "again"))
    assert (fork.buffer.parents, fork.buffer.marks) == ({1: "0-0", 2: "1-4", 3: "1-4"}, ["2-4", "3-4", "3-6", "3-8"])
    assert "eval-3-4" in fork.buffer.evals


def test_a_version_that_is_not_there_and_a_damaged_one_are_refused(trained: World, model: Path, tmp_path: Path) -> None:
    gone, store = forked(tmp_path, trained, "1-5", "refused"), trained.store
    with pytest.raises(ConfigError, match="forked from version 1-5 of run 'demo', which is not in"):
        gone.train(fork_recipe(model, "refused"))
    (key,) = (key for key in store.list("runs/demo/weights/1-2/") if "/delta-" in key)
    whole = store.get(key)
    store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    damaged = forked(tmp_path, trained, "1-2", "refused")
    with pytest.raises(DigestError, match=key):
        damaged.train(fork_recipe(model, "refused"))
    store.put(key, whole)
    assert (gone.buffer.lineage, damaged.buffer.lineage) == (1, 1)


@pytest.mark.parametrize("version", ["1-4", None])
def test_a_model_other_than_the_snapshots_is_refused(trained: World, tmp_path: Path, version: str | None) -> None:
    fork = forked(tmp_path, trained, version, "refused")
    other = make_tiny_model(tmp_path / "other", seed=1, hidden_size=32)
    with pytest.raises(ConfigError, match="is not the model that run 'demo' of snapshot"):
        fork.train(fork_recipe(other, "refused"))
    assert fork.buffer.lineage == 1


def test_a_run_that_begins_with_rollouts_alone_starts_at_the_start(trained: World, model: Path, tmp_path: Path) -> None:
    fork = forked(tmp_path, trained, None, "offline")
    fork.train(fork_recipe(model, "offline", trainer={"num_steps": 2}, searcher={"num_searchers": 0}))
    assert (fork.buffer.parents, fork.buffer.marks) == ({1: "0-0", 2: "0-0"}, ["0-0", "2-2"])
    assert fork.buffer.evals == {}, "nobody could do them"
    assert fork.buffer.state == "done"


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
