"""A trainer whose live settings change between two steps: what it trains with, says in its acks, and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tba.api import SettingsRequest
from tba.config import parse_live
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World

RATE, NEW_RATE = 1e-3, 2e-4
FALLING = {"kind": "linear", "value": 0.4, "final": 0.2, "steps": 10}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def change_during_ack(world: World, step: int, **settings: Any) -> None:
    """Change settings while the ack of `step` is under way, so that its reply is the first to tell of it."""
    acked: list[int] = []

    def before(method: str) -> None:
        if method == "ack":
            acked.append(len(acked) + 1)
            if acked[-1] == step:
                world.buffer.change_settings(SettingsRequest(settings=parse_live(settings)))

    world.buffer.before = before


def of_acks(world: World, name: str) -> list[float | None]:
    return [ack.metrics[name] for _, _, ack in world.buffer.acks]


def test_a_change_holds_from_the_step_after_the_ack_that_told_of_it(world: World, model: Path) -> None:
    trainer = {"num_steps": 8, "sync_interval": 2, "learning_rate": RATE, "checkpoint_interval": 4}
    change_during_ack(world, 3, learning_rate=NEW_RATE, beta=FALLING, eval_every_steps=2)
    world.train(make_recipe(model, trainer=trainer, objective={"beta": 0.1}, eval={"every_steps": 100}))
    assert of_acks(world, "learning_rate") == [RATE] * 3 + [NEW_RATE] * 5
    assert of_acks(world, "beta") == pytest.approx([0.1] * 3 + [0.4 - 0.02 * step for step in range(3, 8)])
    assert [ack.settings_revision for _, _, ack in world.buffer.acks] == [0] * 3 + [1] * 5
    assert list(world.buffer.evals) == ["eval-0-0", "eval-1-4", "eval-1-6", "eval-1-8"]


def test_a_trainer_that_resumes_goes_on_with_what_was_changed_and_its_checkpoint_says_with_what(
    world: World, model: Path
) -> None:
    recipe = make_recipe(model, trainer={"num_steps": 6, "sync_interval": 2, "learning_rate": RATE})
    change_during_ack(world, 2, learning_rate=NEW_RATE)
    change = world.buffer.before
    world.stop_after(4)
    stop = world.buffer.before
    world.buffer.before = lambda method: (change(method), stop(method))[0]
    world.train(recipe)
    state = json.loads(world.store.get("runs/demo/checkpoints/1-4/state.json"))
    assert state["settings_revision"] == 1
    world.buffer.before = lambda method: None
    world.train(recipe)
    assert world.buffer.parents[2] == "1-4"
    assert of_acks(world, "learning_rate") == [RATE] * 2 + [NEW_RATE] * 4
    assert [ack.settings_revision for _, _, ack in world.buffer.acks] == [0, 0, 1, 1, 1, 1]
