"""An operator's rollback in the training loop, over a recorded buffer: when it is done, that it is done once, and what
happens without the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.config import Recipe
from tba.errors import GuardError, ObjectNotFoundError, TbaError
from tests.support.guards import make_guards
from tests.support.stored_checkpoint import object_keys
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World, same


def recipe(model: Path) -> Recipe:
    # no rollback of an alarm is allowed, so one that counted an operator's would fail the run
    guards = make_guards(non_finite={"action": "rollback"}, max_rollbacks=0)
    trainer = {"guards": guards, "num_steps": 7, "sync_interval": 2, "checkpoint_interval": 2, "keep_checkpoints": 2}
    return make_recipe(model, trainer=trainer)


def ask_at(world: World, *, method: str, step: int, version: str, kill_at: str | None = None) -> None:
    """An operator asks when the first lineage calls `method` after `step`, once; `kill_at` of the next start kills."""
    asked = False

    def before(called: str) -> None:
        nonlocal asked
        if not asked and called == method and world.buffer.step == step:
            world.buffer.ask_for_rollback(version)
            asked = True
        elif asked and called == kill_at:
            raise TbaError("killed")

    world.buffer.before = before


@pytest.mark.parametrize(
    ("method", "step", "version", "acked"),
    [
        ("ack", 5, "1-2", [1, 2, 3, 4, 5, 3, 4, 5, 6, 7]),  # the step under way is not made
        ("register_checkpoint", 6, "1-2", [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7]),  # 1-2 is not deleted for 1-6
        ("command:done", 7, "1-6", [1, 2, 3, 4, 5, 6, 7, 7]),  # the run is not over before it is done
    ],
)
def test_the_trainer_rolls_back_at_its_next_boundary_and_continues_from_the_same_weights(
    world: World, model: Path, method: str, step: int, version: str, acked: list[int]
) -> None:
    ask_at(world, method=method, step=step, version=version)
    world.train(recipe(model))
    buffer, again = world.buffer, version.replace("1-", "2-")
    assert (buffer.state, buffer.parents, buffer.num_rollbacks) == ("done", {1: "0-0", 2: version}, 0)
    assert ([step for _, step, _ in buffer.acks], buffer.checkpoint) == (acked, ("2-7", "runs/demo/checkpoints/2-7"))
    assert buffer.kept[-1] == "2-7"
    assert all(world.store.size_bytes(f"runs/demo/checkpoints/{kept}/manifest.json") for kept in buffer.kept)
    assert same(world.tensors(version), world.tensors(again))


def test_kills_and_a_damaged_checkpoint_neither_lose_the_request_nor_repeat_it(world: World, model: Path) -> None:
    settings, buffer = recipe(model), world.buffer
    ask_at(world, method="ack", step=5, version="1-4", kill_at="new_lineage")
    with pytest.raises(TbaError, match="killed"):
        world.train(settings)
    assert buffer.rollback is not None
    assert buffer.parents == {1: "0-0"}
    for key in object_keys(world.store, "runs/demo/checkpoints/1-4", "model"):
        world.store.put(key, b"not what was written")
    world.train_until_killed(settings, "run", lineage=2)  # nothing but the lineage itself has been asked for
    assert (buffer.rollback, buffer.checkpoint) == (None, ("1-2", "runs/demo/checkpoints/1-2"))
    world.train(settings)
    assert (buffer.state, buffer.parents) == ("done", {1: "0-0", 2: "1-2", 3: "1-2"})


@pytest.mark.parametrize("lost", ["1-2", "1-2 1-4"])
def test_without_an_intact_checkpoint_before_it_the_run_fails(world: World, model: Path, lost: str) -> None:
    settings, buffer = recipe(model), world.buffer
    ask_at(world, method="ack", step=5, version="1-2")
    ask = buffer.before

    def before(method: str) -> None:
        ask(method)
        assert method != "command:fail", "a kill before this call would leave a run that continues"
        if buffer.rollback is not None:
            for version in lost.split():
                world.store.delete(f"runs/demo/checkpoints/{version}/manifest.json")

    buffer.before = before
    sentence = "rollback to 1-2, but every checkpoint at or before it is gone or damaged; .* continues from 1-4"
    with pytest.raises(GuardError, match=sentence):
        world.train(settings)
    assert (buffer.state, buffer.rollback) == ("failed", None)
    if lost != "1-2":
        with pytest.raises(ObjectNotFoundError, match="checkpoints/1-4 is not in"):
            world.train(settings)
        return
    world.train(settings)
    assert (buffer.state, buffer.parents) == ("done", {1: "0-0", 2: "1-4", 3: "1-4"})


def test_a_stop_between_request_and_new_lineage_stays_a_stop(world: World, model: Path) -> None:
    ask_at(world, method="ack", step=5, version="1-2")
    ask = world.buffer.before

    def before(method: str) -> None:
        ask(method)
        if method == "new_lineage" and world.buffer.lineage == 1:  # as the service withdraws it
            world.buffer.state, world.buffer.rollback = "stopping", None

    world.buffer.before = before
    world.train(recipe(model))
    assert (world.buffer.state, [lineage for lineage, _, _ in world.buffer.acks]) == ("done", [1] * 5)
    # nobody wants to go back any more: the last checkpoint is what the run ends with
    assert (world.buffer.parents, world.buffer.marks[-1]) == ({1: "0-0", 2: "1-4"}, "2-4")


def test_sigterm_while_a_rollback_waits_is_an_orderly_end_and_the_next_start_does_it(world: World, model: Path) -> None:
    ask_at(world, method="ack", step=5, version="1-2")
    ask = world.buffer.before

    def before(method: str) -> None:
        ask(method)
        if world.buffer.rollback is not None:
            world.stop.set()

    world.buffer.before = before
    world.train(recipe(model))
    assert world.buffer.beats[-1].state == "stopped"
    assert world.buffer.rollback is not None
    world.buffer.before = lambda method: None
    world.train(recipe(model))
    assert (world.buffer.state, world.buffer.parents) == ("done", {1: "0-0", 2: "1-2"})


def test_a_rollback_ends_the_wait_for_the_final_evaluation(world: World, model: Path) -> None:
    world.buffer.eval_state, asked_for = "pending", 0

    def before(called: str) -> None:
        nonlocal asked_for
        if called == "get_eval":
            asked_for += 1
            world.buffer.ask_for_rollback("1-6")
        elif called == "new_lineage" and asked_for:
            world.buffer.eval_state, world.buffer.before = "done", lambda _: None

    world.buffer.before = before
    world.train(recipe(model))
    assert asked_for == 1, "searchers would go on evaluating weights that are given up"
    assert (world.buffer.state, world.buffer.parents) == ("done", {1: "0-0", 2: "1-6"})
