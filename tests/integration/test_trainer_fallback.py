"""A damaged checkpoint costs steps, not the run: the next older one that is whole is resumed from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tba.errors import DigestError
from tba.store import ObjectStore
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World

CHECKPOINTS = "runs/demo/checkpoints"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def stopped_after(world: World, model: Path, step: int) -> None:
    world.stop_after(step)
    world.train(make_recipe(model, trainer={"checkpoint_interval": 1, "keep_checkpoints": 3, "num_steps": 6}))
    world.buffer.before = lambda method: None


def flip(store: ObjectStore, key: str) -> None:
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))


DAMAGE: dict[str, Callable[[ObjectStore, str], None]] = {
    "a bit": lambda store, key: flip(store, f"{key}/optimizer-00001.safetensors"),
    "a file": lambda store, key: store.delete(f"{key}/model-00001.safetensors"),
    "the manifest": lambda store, key: store.delete(f"{key}/manifest.json"),
    "nonsense": lambda store, key: store.put(f"{key}/manifest.json", b"{}"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_the_next_older_checkpoint_is_resumed_from_and_the_steps_after_it_are_abandoned(
    tmp_path: Path, model: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, world = World(tmp_path / "whole"), World(tmp_path / "damaged")
    stopped_after(world, model, 4)
    DAMAGE[damage](world.store, f"{CHECKPOINTS}/1-4")
    recipe = make_recipe(model, trainer={"checkpoint_interval": 1, "keep_checkpoints": 3, "num_steps": 6})
    world.train(recipe)
    assert world.buffer.parents == {1: "0-0", 2: "1-3"}  # what comes after 1-3 is abandoned in the ledger
    assert [(n, s) for n, s, _ in world.buffer.acks if n == 2] == [(2, 4), (2, 5), (2, 6)]
    said = capsys.readouterr().out
    assert "checkpoint_damaged" in said
    assert "resumed_from=1-3" in said
    whole.train(recipe)
    expected, found = whole.tensors("1-6"), world.tensors("2-6")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_only_checkpoints_of_the_active_lineage_are_fallen_back_to(world: World, model: Path) -> None:
    """1-3 was abandoned by lineage 2, which began at 1-2: it is not in the history of 2-3."""
    stopped_after(world, model, 3)
    flip(world.store, f"{CHECKPOINTS}/1-3/model-00001.safetensors")
    stopped_after(world, model, 4)  # the buffer still says step 3, so this one stops after its first
    assert world.buffer.parents[2] == "1-2"
    assert world.buffer.checkpoint == ("2-3", f"{CHECKPOINTS}/2-3")
    flip(world.store, f"{CHECKPOINTS}/1-3/model-00001.safetensors")  # whole again
    flip(world.store, f"{CHECKPOINTS}/2-3/model-00001.safetensors")
    world.train(make_recipe(model, trainer={"num_steps": 6}))
    assert world.buffer.parents[3] == "1-2"


def test_without_a_whole_one_the_damage_of_the_registered_one_is_told_and_no_lineage_is_taken(
    world: World, model: Path
) -> None:
    stopped_after(world, model, 2)
    for version in ("1-1", "1-2"):
        flip(world.store, f"{CHECKPOINTS}/{version}/model-00001.safetensors")
    with pytest.raises(DigestError, match=r"checkpoints/1-2/model.*damaged"):
        world.train(make_recipe(model, trainer={"num_steps": 6}))
    assert world.buffer.lineage == 1
