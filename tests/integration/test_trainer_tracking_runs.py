"""metrics.jsonl of whole trainers: every step of the active lineage once, over starts, rollbacks and broken disks."""

from __future__ import annotations

import json
import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tba_trainer.learner.learner import Learner

from tba.errors import ConfigError
from tba.wire import Batch
from tba_cli.reports.ledger import active_steps, lineage_tree
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


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


def test_every_step_and_every_evaluation_is_in_the_file_with_the_numbers_of_the_ledger(
    world: World, model: Path
) -> None:
    world.train(make_recipe(model, trainer={"num_steps": 4, "sync_interval": 2}, tracking=tracked(world)))
    assert [(line["lineage"], line["step"], line["parent"]) for line in lines_of(world, "start")] == [(1, 0, "0-0")]
    steps = lines_of(world, "step")
    assert [(line["lineage"], line["step"]) for line in steps] == [(1, step) for step in range(1, 5)]
    for line, (_, _, ack) in zip(steps, world.buffer.acks, strict=True):
        assert line["metrics"] == ack.metrics
        assert line["run"] == "demo"
    evaluations = {line["eval_id"]: (line["lineage"], line["step"]) for line in lines_of(world, "evaluation")}
    assert evaluations == {"eval-0-0": (0, 0), "eval-1-2": (1, 2), "eval-1-4": (1, 4)}
    assert len(lines_of(world, "evaluation")) == 3
    assert world.buffer.beats[-1].gauges["num_tracking_dropped"] == 0


def test_after_a_kill_the_file_tells_the_steps_that_count_from_those_that_were_made_again(
    world: World, model: Path
) -> None:
    recipe = make_recipe(
        model, trainer={"num_steps": 6, "sync_interval": 2, "checkpoint_interval": 2}, tracking=tracked(world)
    )

    def killed(method: str) -> None:
        if method == "ack" and world.buffer.step == 3:
            raise KeyboardInterrupt

    world.buffer.before = killed
    with pytest.raises(KeyboardInterrupt):
        world.train(recipe)
    world.buffer.before = lambda method: None
    world.train(recipe)
    assert [line["parent"] for line in lines_of(world, "start")] == ["0-0", "1-2"]
    made = [(line["lineage"], line["step"]) for line in lines_of(world, "step")]
    assert made == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5), (2, 6)]
    assert [(line["lineage"], line["step"]) for line in active(world)] == [(1, 1), (1, 2), *made[3:]]
    ids = [line["eval_id"] for line in lines_of(world, "evaluation")]
    assert sorted(ids) == sorted({"eval-0-0", "eval-1-2", "eval-2-4", "eval-2-6"})


def test_a_rollback_is_a_start_and_a_skipped_step_says_why(
    world: World, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients, bad = Learner.gradients, [4]

    def once_bad(self: Learner, batch: Batch, *, step: int, **kwargs: Any) -> dict[str, float | None]:
        metrics = gradients(self, batch, step=step, **kwargs)
        if step in bad:
            bad.clear()
            metrics["loss"] = math.nan
        return metrics

    monkeypatch.setattr(Learner, "gradients", once_bad)
    trainer = {"num_steps": 6, "checkpoint_interval": 2, "guards": {"non_finite": {"action": "rollback"}}}
    world.train(make_recipe(model, trainer=trainer, tracking=tracked(world)))
    assert [line["parent"] for line in lines_of(world, "start")] == ["0-0", "1-2"]
    skipped = {(line["lineage"], line["step"]): line.get("skipped") for line in lines_of(world, "step")}
    assert skipped == {(1, 1): None, (1, 2): None, (1, 3): None, (1, 4): "non_finite"} | {
        (2, n): None for n in range(3, 7)
    }
    assert [(line["lineage"], line["step"]) for line in active(world)] == [
        (1, 1),
        (1, 2),
        *((2, n) for n in range(3, 7)),
    ]


def test_a_disk_that_takes_nothing_is_counted_and_ends_no_training(world: World, model: Path) -> None:
    world.train(make_recipe(model, trainer={"num_steps": 2}, tracking={"metrics_path": "/dev/full"}))
    assert world.buffer.state == "done"
    assert world.buffer.beats[-1].gauges["num_tracking_failed"] >= 3


def test_what_cannot_be_tracked_is_refused_before_a_lineage_is_taken(
    world: World, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.metrics_path .* cannot be written"):
        world.train(make_recipe(model, tracking={"metrics_path": str(world.folder)}))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "trackio", None)
        with pytest.raises(ConfigError, match=r"pip install -e './services/trainer\[trackio\]'"):
            world.train(make_recipe(model, tracking={**tracked(world), "trackio": {"project": "p"}}))
    assert world.buffer.lineage == 0


def test_a_buffer_that_does_not_answer_does_not_hold_up_the_end(world: World, model: Path) -> None:
    answered = threading.Event()

    def before(method: str) -> None:
        if method == "run" and threading.current_thread().name == "tracking-evaluations":
            assert answered.wait(60)

    world.buffer.before = before
    world.train(make_recipe(model, trainer={"num_steps": 2}, tracking={**tracked(world), "close_s": 0.1}))
    assert world.buffer.state == "done"
    assert [line["step"] for line in lines_of(world, "step")] == [1, 2]
    answered.set()
