"""Runs of a trainer whose settings change, whose versions are missing, and that are tracked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tba_trainer.tracking import tracker_group

from tba.api import SettingsRequest
from tba.config import parse_live
from tba.errors import DigestError
from tba.store import ObjectStore
from tba_cli.reports.ledger import active_steps, lineage_tree
from tests.support.rollout_values import replace
from tests.support.stored_checkpoint import object_keys
from tests.support.trainer_values import make_batch, make_recipe
from tests.support.trainer_world import World, same
from tests.support.weight_chain import flip

CHECKPOINTS = "runs/demo/checkpoints"
KEEPS = {"checkpoint_interval": 1, "keep_checkpoints": 3, "num_steps": 6}


def stopped_after(world: World, model: Path, step: int) -> None:
    world.stop_after(step)
    world.train(make_recipe(model, trainer=KEEPS))


DAMAGE: dict[str, Callable[[ObjectStore, str], object]] = {
    "a bit": lambda store, key: flip(store, object_keys(store, key, "optimizer")[0]),
    "a file": lambda store, key: store.delete(object_keys(store, key, "model")[0]),
    "the manifest": lambda store, key: store.delete(f"{key}/manifest.json"),
    "nonsense": lambda store, key: store.put(f"{key}/manifest.json", b"{}"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_the_next_older_is_taken(tmp_path: Path, model: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole, world = World(tmp_path / "whole"), World(tmp_path / "damaged")
    stopped_after(world, model, 4)
    DAMAGE[damage](world.store, f"{CHECKPOINTS}/1-4")
    recipe = make_recipe(model, trainer=KEEPS)
    world.train(recipe)
    assert world.buffer.parents == {1: "0-0", 2: "1-3"}  # the steps after 1-3 are abandoned in the ledger
    assert [(n, s) for n, s, _ in world.buffer.acks if n == 2] == [(2, 4), (2, 5), (2, 6)]
    said = capsys.readouterr().out
    assert "checkpoint_damaged" in said
    assert "resumed_from=1-3" in said
    whole.train(recipe)
    assert same(whole.tensors("1-6"), world.tensors("2-6"))


def test_only_checkpoints_of_the_active_lineage_are_fallen_back_to(world: World, model: Path) -> None:
    """1-3 was abandoned by lineage 2, which began at 1-2: it is not in the history of 2-3."""
    stopped_after(world, model, 3)
    flip(world.store, object_keys(world.store, f"{CHECKPOINTS}/1-3", "model")[0])
    stopped_after(world, model, 3)
    assert (world.buffer.parents[2], world.buffer.checkpoint) == ("1-2", ("2-3", f"{CHECKPOINTS}/2-3"))
    flip(world.store, object_keys(world.store, f"{CHECKPOINTS}/1-3", "model")[0])  # whole again
    flip(world.store, object_keys(world.store, f"{CHECKPOINTS}/2-3", "model")[0])
    world.train(make_recipe(model, trainer={"num_steps": 6}))
    assert world.buffer.parents[3] == "1-2"


def test_without_a_whole_one_the_damage_of_the_registered_one_is_told(world: World, model: Path) -> None:
    stopped_after(world, model, 2)
    for version in ("1-1", "1-2"):
        flip(world.store, object_keys(world.store, f"{CHECKPOINTS}/{version}", "model")[0])
    with pytest.raises(DigestError, match=r"of checkpoint runs/demo/checkpoints/1-2 .*damaged"):
        world.train(make_recipe(model, trainer={"num_steps": 6}))
    assert world.buffer.lineage == 1


RATE, NEW_RATE = 1e-3, 2e-4
FALLING = {"kind": "linear", "value": 0.4, "final": 0.2, "steps": 10}


def of_acks(world: World, name: str) -> list[float | None]:
    return [ack.metrics[name] for _, _, ack in world.buffer.acks]


def test_a_change_holds_from_the_step_after_the_ack_that_told_of_it(world: World, model: Path) -> None:
    trainer = {"num_steps": 8, "sync_interval": 2, "learning_rate": RATE, "checkpoint_interval": 4}
    change = SettingsRequest(settings=parse_live({"learning_rate": NEW_RATE, "beta": FALLING, "eval_every_steps": 2}))
    world.at("ack", lambda: world.buffer.change_settings(change), step=2)  # the reply to 3 is the first to tell of it
    world.train(make_recipe(model, trainer=trainer, objective={"beta": 0.1}, eval={"every_steps": 100}))
    assert of_acks(world, "learning_rate") == [RATE] * 3 + [NEW_RATE] * 5
    assert of_acks(world, "beta") == pytest.approx([0.1] * 3 + [0.4 - 0.02 * step for step in range(3, 8)])
    assert [ack.settings_revision for _, _, ack in world.buffer.acks] == [0] * 3 + [1] * 5
    assert list(world.buffer.evals) == ["eval-0-0", "eval-1-4", "eval-1-6", "eval-1-8"]
    assert json.loads(world.store.get("runs/demo/checkpoints/1-8/state.json"))["settings_revision"] == 1


def tracked(world: World) -> dict[str, str]:
    return {"metrics_path": str(world.folder / "metrics.jsonl")}


def lines_of(world: World, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (world.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def active(world: World) -> list[dict[str, Any]]:
    """The steps of the active lineage, by what the file alone says."""
    starts, steps = lines_of(world, "start"), lines_of(world, "step")
    tree = lineage_tree({line["lineage"]: line["parent"] for line in starts})
    last = max(line["step"] for line in steps if line["lineage"] == starts[-1]["lineage"])
    ranges = active_steps(tree, lineage=starts[-1]["lineage"], step=last)
    return [line for line in steps if line["step"] in ranges.get(line["lineage"], ())]


def test_every_step_and_evaluation_is_in_the_file_with_the_ledgers_numbers(world: World, model: Path) -> None:
    world.buffer.batch_of = lambda step: make_batch(step) if step != 3 else replace(make_batch(3), groups=())
    world.train(make_recipe(model, trainer={"num_steps": 4, "sync_interval": 2}, tracking=tracked(world)))
    assert [(line["lineage"], line["step"], line["parent"]) for line in lines_of(world, "start")] == [(1, 0, "0-0")]
    steps = lines_of(world, "step")
    assert [(line["lineage"], line["step"]) for line in steps] == [(1, step) for step in range(1, 5)]
    for line, (_, _, ack) in zip(steps, world.buffer.acks, strict=True):
        assert (line["run"], line["metrics"], line.get("skipped")) == ("demo", ack.metrics, ack.skipped)
    assert [line.get("skipped") for line in steps] == [None, None, "refused", None]
    evaluations = {line["eval_id"]: (line["lineage"], line["step"]) for line in lines_of(world, "evaluation")}
    assert evaluations == {"eval-0-0": (0, 0), "eval-1-2": (1, 2), "eval-1-4": (1, 4)}
    assert (len(lines_of(world, "evaluation")), world.buffer.beats[-1].gauges["num_tracking_dropped"]) == (3, 0)


def test_after_a_kill_the_file_tells_which_steps_count(world: World, model: Path) -> None:
    trainer = {"num_steps": 6, "sync_interval": 2, "checkpoint_interval": 2}
    recipe = make_recipe(model, trainer=trainer, tracking=tracked(world))
    world.train_until_killed(recipe, "ack", step=3)
    world.train(recipe)
    assert [line["parent"] for line in lines_of(world, "start")] == ["0-0", "1-2"]
    made = [(line["lineage"], line["step"]) for line in lines_of(world, "step")]
    assert made == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5), (2, 6)]
    assert [(line["lineage"], line["step"]) for line in active(world)] == [(1, 1), (1, 2), *made[3:]]
    ids = [line["eval_id"] for line in lines_of(world, "evaluation")]
    assert sorted(ids) == sorted({"eval-0-0", "eval-1-2", "eval-2-4", "eval-2-6"})


def test_a_disk_that_takes_nothing_is_counted_and_ends_no_training(world: World, model: Path) -> None:
    world.train(make_recipe(model, trainer={"num_steps": 2}, tracking={"metrics_path": "/dev/full"}))
    assert world.buffer.state == "done"
    assert world.buffer.beats[-1].gauges["num_tracking_failed"] >= 3


def test_a_silent_buffer_does_not_hold_up_the_end(world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(tracker_group, "CLOSE_S", 0.1)

    def before(method: str) -> None:
        if method == "run" and threading.current_thread().name == "tracking-evaluations":
            assert answered.wait(60)

    world.buffer.before = before
    world.train(make_recipe(model, trainer={"num_steps": 2}, tracking=tracked(world)))
    assert (world.buffer.state, [line["step"] for line in lines_of(world, "step")]) == ("done", [1, 2])
    answered.set()
