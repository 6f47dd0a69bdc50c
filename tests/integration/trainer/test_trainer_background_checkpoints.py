"""Checkpoints that are uploaded beside training, over a recorded buffer and a real store."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tba_trainer.checkpoints import parts
from tba_trainer.loop import checkpoint_writer, limits

from tba.errors import StoreUnavailableError, TbaError
from tests.support.stored_checkpoint import section_tensors
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World, at_put
from tests.support.waits import until


class Uploads(World):
    """A run whose checkpoints are uploaded beside training."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.patch = patch
        patch.setattr(limits, "BACKGROUND_BYTES", 0)

    def at_upload(self, action: Callable[[str], object]) -> None:
        """Call `action` with the version before each upload; it may raise."""

        def put(key: str, path: Path) -> None:
            if "/checkpoints/" in key and path.name == "model-00001.safetensors":
                action("-".join(path.parent.name.split("-")[:2]))

        at_put(self.patch, put)

    def hold(self, version: str, what: str, condition: Callable[[list[str]], object]) -> list[str]:
        """Hold the upload of a version until the condition holds for those that have begun, which are returned."""
        begun: list[str] = []

        def wait(each: str) -> None:
            begun.append(each)
            if each == version:
                until(what, lambda: condition(begun))

        self.at_upload(wait)
        return begun

    def leave_no_room(self) -> None:
        self.patch.setattr(parts, "free_bytes", lambda: 0)

    def registrations(self) -> list[tuple[str, int]]:
        """Return each registered checkpoint with the step that was done then; filled while training."""
        found: list[tuple[str, int]] = []
        register = self.buffer.register_checkpoint

        def note(request: Any) -> None:
            register(request)
            found.append((request.version, self.buffer.step))

        self.buffer.register_checkpoint = note  # type: ignore[method-assign]
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uploads:
    return Uploads(tmp_path, monkeypatch)


def recipe_of(model: Path, **trainer: Any) -> Any:
    values = {"sync_interval": 1, "keep_checkpoints": 9, "export": False, **trainer}
    return make_recipe(model, trainer={"num_steps": 9, "checkpoint_interval": 3, **values})


def test_steps_go_on_during_an_upload(world: Uploads, model: Path) -> None:
    """The upload of 1-3 begins when step 5 is done, so a loop that waited for it would wait for ever."""
    world.hold("1-3", "step 5", lambda _: world.buffer.step >= 5)
    found = world.registrations()
    world.train(recipe_of(model))
    assert found[0][0] == "1-3"
    assert found[0][1] >= 5
    assert found[-1] == ("1-9", 9)  # the last one is waited for
    for version, _ in found:
        checkpoint = section_tensors(world.store, f"runs/demo/checkpoints/{version}", "model")
        for name, tensor in world.tensors(version).items():
            assert torch.equal(tensor, checkpoint[name]), (version, name)


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize(
    "error", [StoreUnavailableError("the store is away"), OSError(errno.ENOSPC, "No space left on device")]
)
def test_a_failed_upload_is_made_again_at_a_sync(world: Uploads, model: Path, error: Exception, has_room: bool) -> None:
    tried: list[str] = []

    def fail_once(version: str) -> None:
        tried.append(version)
        if len(tried) == 1:
            raise error

    world.at_upload(fail_once)
    if not has_room:
        world.leave_no_room()
    found = world.registrations()
    world.train(recipe_of(model, num_steps=30, checkpoint_interval=25))
    assert (tried[0], [version for version, _ in found]) == ("1-25", tried[1:])
    assert tried[1] in {f"1-{step}" for step in range(26, 31)}


def test_a_stop_during_an_upload_keeps_the_newest(world: Uploads, model: Path) -> None:
    """The upload of 1-3 waits until the one of the last step, which SIGTERM asks for, has begun."""
    begun = world.hold("1-3", "the last upload has begun", lambda begun: len(begun) == 2)
    world.stop_after(5)
    world.train(recipe_of(model))
    assert world.buffer.checkpoint == (begun[-1], f"runs/demo/checkpoints/{begun[-1]}")
    assert begun == ["1-3", f"1-{world.buffer.step}"]
    world.train(recipe_of(model))
    assert (world.buffer.state, world.buffer.marks[-1]) == ("done", "2-9")


def test_a_refused_last_one_keeps_what_was_under_way(world: Uploads, model: Path) -> None:
    def refuse_others(version: str) -> None:
        if version != "1-3":
            raise StoreUnavailableError("the store is away")
        until("step 5", lambda: world.buffer.step >= 5)

    world.at_upload(refuse_others)
    world.stop_after(5)
    with pytest.raises(StoreUnavailableError, match=r"stopped at step \d without a checkpoint .* after 3"):
        world.train(recipe_of(model))
    assert world.buffer.checkpoint == ("1-3", "runs/demo/checkpoints/1-3")


def test_an_error_during_an_upload_keeps_it(world: Uploads, model: Path) -> None:
    failed: list[int] = []
    world.at_upload(lambda version: until("the error", lambda: failed))

    def fail() -> None:
        failed.append(world.buffer.step)
        raise TbaError("the ledger and this trainer disagree")

    world.at("ack", fail, step=4)
    with pytest.raises(TbaError, match="disagree"):
        world.train(recipe_of(model))
    assert world.buffer.checkpoint == ("1-3", "runs/demo/checkpoints/1-3")


def test_without_room_to_copy_it_a_checkpoint_is_uploaded_before_the_next_step(world: Uploads, model: Path) -> None:
    begun: list[tuple[str, int]] = []
    world.at_upload(lambda version: begun.append((version, world.buffer.step)))
    world.leave_no_room()
    found = world.registrations()
    world.train(recipe_of(model))
    assert begun == found == [("1-3", 3), ("1-6", 6), ("1-9", 9)]


def test_a_stop_while_a_checkpoint_without_room_is_uploaded_is_seen_and_keeps_it(world: Uploads, model: Path) -> None:
    """The upload of 1-3 goes on when the trainer has said that it stops."""

    def wait(version: str) -> None:
        def waits_while(state: str) -> bool:
            beats = [(beat.state, beat.wait and beat.wait.name) for beat in world.buffer.beats]
            return (state, "checkpoint-upload") in beats

        until("the wait is named", lambda: waits_while("training"))
        world.stop.set()
        until("it stops", lambda: waits_while("stopping"))

    world.at_upload(wait)
    world.leave_no_room()
    world.train(recipe_of(model))
    assert (world.buffer.checkpoint, world.buffer.step) == (("1-3", "runs/demo/checkpoints/1-3"), 3)


def test_an_upload_without_room_that_takes_too_long_is_given_up_and_taken_again(world: Uploads, model: Path) -> None:
    begun = world.hold("1-3", "it is taken again", lambda begun: len(begun) == 2)
    world.leave_no_room()
    world.patch.setattr(limits, "UPLOAD_S", 0.05)
    world.patch.setattr(checkpoint_writer, "STORE_TIMEOUT_S", 0.05)
    world.at("ack", lambda: setattr(limits, "UPLOAD_S", 60.0), step=3)
    found = world.registrations()
    world.train(recipe_of(model))
    assert (begun[:2], found[0]) == (["1-3", "1-4"], ("1-4", 4))


def test_a_rollback_during_an_upload_leaves_nothing(world: Uploads, model: Path) -> None:
    """1-3 is stored. The upload of 1-6 is under way when an operator asks for a rollback to 1-3."""
    is_asked = []
    world.hold("1-6", "the rollback is asked for", lambda _: is_asked)

    def ask() -> None:
        if not is_asked:
            is_asked.append(True)
            world.buffer.ask_for_rollback("1-3")

    world.at("ack", ask, step=7)
    world.train(recipe_of(model, num_steps=12))
    assert (world.buffer.state, world.buffer.parents[2]) == ("done", "1-3")
    assert world.buffer.checkpoint == ("2-12", "runs/demo/checkpoints/2-12")
    # the upload was given up: nothing came into the folder after the next lineage had deleted what was incomplete
    assert not world.store.list("runs/demo/checkpoints/1-6/")
