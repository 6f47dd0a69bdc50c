"""LoRA through the whole trainer: checkpoints, resume to the bit, refusals, and two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from transformers import AutoModelForCausalLM

from tba.api import OriginInfo
from tba.errors import ConfigError
from tba.versions import PolicyVersion
from tests.support.stored_checkpoint import section_tensors
from tests.support.trainer_team import run_alone, run_team
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World, same

LORA = {"rank": 4, "alpha": 8}
TRAINER = {"num_steps": 6, "sync_interval": 3, "checkpoint_interval": 100, "learning_rate": {"value": 1e-2}}
ANCHORS: dict[str, dict[str, Any]] = {
    "fixed": {"preset": "tb"},
    "reset": {"preset": "tba_prime", "reference_reset_steps": 2},
}


def files_of(world: World, version: str, section: str) -> dict[str, torch.Tensor]:
    return section_tensors(world.store, f"runs/demo/checkpoints/{version}", section)


@pytest.mark.parametrize("anchor", list(ANCHORS))
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_never_stopped(tmp_path: Path, model: Path, anchor: str) -> None:
    recipe = make_recipe(model, model={"lora": LORA}, trainer=TRAINER, objective={"beta": 0.1, **ANCHORS[anchor]})
    whole, broken = World(tmp_path / "whole"), World(tmp_path / "broken")
    whole.train(recipe)
    broken.stop_after(3)
    broken.train(recipe)
    assert broken.buffer.checkpoint == ("1-3", "runs/demo/checkpoints/1-3")
    broken.train(recipe)
    assert broken.buffer.parents == {1: "0-0", 2: "1-3"}
    expected, found, start = whole.tensors("1-6"), broken.tensors("2-6"), whole.tensors("0-0")
    assert same(expected, found)
    moved = {name.rpartition(".")[0].rpartition(".")[2] for name in start if not torch.equal(start[name], found[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    section, moments = files_of(broken, "2-6", "model"), files_of(broken, "2-6", "optimizer")
    assert all(".lora_" in name for name in (*section, *moments))
    assert len(moments) == 3 * len(section) == 3 * 2 * 2 * 7  # A and B of seven layers in two blocks
    assert bool(files_of(broken, "2-6", "reference")) == (anchor != "fixed")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_canary_is_that_of_the_merged_weights(world: World, model: Path, tmp_path: Path, dtype: str) -> None:
    world.train(make_recipe(model, model={"lora": LORA, "dtype": dtype}, trainer=TRAINER))
    folder = tmp_path / "export"
    for key in world.store.list("runs/demo/export/"):
        world.store.get_file(key, folder / key.rpartition("/")[2])
    exported: Any = AutoModelForCausalLM.from_pretrained(folder)
    published = world.tensors("1-6")
    assert published.keys() == dict(exported.named_parameters()).keys()
    assert all(torch.equal(p, published[name]) for name, p in exported.named_parameters())
    manifest = world.versions.manifest(PolicyVersion(1, 6))
    assert manifest.adapter is not None
    assert not manifest.is_full
    canary = manifest.canary
    prompt, response = torch.tensor(canary.prompt_tokens), torch.tensor(canary.response_tokens)
    policy = LogprobModel(exported, temperature=1.0)
    found = policy.token_logprobs(pack_sequences([prompt.int().numpy()], [response.int().numpy()], "cpu"))
    torch.testing.assert_close(found.float(), torch.tensor(canary.logprobs), atol=1e-6, rtol=0.0)


def test_versions_of_a_run_are_adapters_that_peft_reads(world: World, model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, model={"dtype": "bfloat16", "lora": LORA}, trainer=TRAINER)
    for step in (2, 99):
        world.stop_after(step)
        world.train(recipe)
    manifests = [world.versions.manifest(version) for version in world.versions.versions()]
    assert manifests[0].version == "0-0"
    assert [m.adapter is not None for m in manifests] == [False, *[True] * (len(manifests) - 1)]
    gauges = world.buffer.beats[-1].gauges
    assert gauges["published_adapter_bytes_total"] == sum(m.adapter_bytes for m in manifests if m.version[0] == "2")

    # a person may hand the stored adapter to peft
    adapter = manifests[-1].adapter
    assert adapter is not None
    folder = tmp_path / "adapter"
    world.store.get_file(adapter.stored.key, folder / "adapter_model.safetensors")
    LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=r".*_proj").save_pretrained(str(folder))
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float()
    merged: Any = PeftModel.from_pretrained(base, folder).merge_and_unload()
    published, start = world.tensors("2-6"), world.tensors("0-0")
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(published[name].float(), parameter, rtol=2**-8, atol=1e-7)
        assert torch.equal(published[name], start[name]) == ("_proj" not in name)


@pytest.mark.parametrize("lora", [None, {**LORA, "alpha": 16}, {**LORA, "target_modules": ["q_proj"]}])
def test_another_adapter_under_the_same_run_is_refused(world: World, model: Path, lora: dict[str, Any] | None) -> None:
    world.stop_after(2)
    world.train(make_recipe(model, model={"lora": LORA}, trainer=TRAINER))
    with pytest.raises(ConfigError, match=r"\[model\.lora\] is .*, but this run has trained with rank=4 alpha=8"):
        world.train(make_recipe(model, model={"lora": lora}, trainer=TRAINER))
    assert world.buffer.lineage == 1


def test_a_version_without_a_checkpoint_cannot_be_forked(world: World, model: Path) -> None:
    world.train(make_recipe(model, model={"lora": LORA}, trainer=TRAINER))
    other = World(world.folder / "fork")
    other.store = world.store
    other.buffer.origin = OriginInfo(source="demo/all", version="1-3", state="complete", lineage=1)
    with pytest.raises(ConfigError, match=r"version 1-3 of run 'demo' has no checkpoint, and its weights are merged"):
        other.train(make_recipe(model, run={"name": "fork"}, model={"lora": LORA}, trainer=TRAINER))


def test_two_processes_train_the_adapter_that_one_trains_and_one_continues_with_it(tmp_path: Path, model: Path) -> None:
    reference = {"preset": "tba_prime", "reference_reset_steps": 2}
    recipe = make_recipe(model, model={"lora": LORA}, trainer=TRAINER, objective=reference)
    alone = run_alone(tmp_path / "alone", recipe, num_steps=5)
    team = run_team(tmp_path / "team", recipe, num_ranks=2, num_steps=3)
    after = run_alone(tmp_path / "after", recipe, num_steps=2, resume=team)
    for mine, theirs in zip(alone.metrics, [*team.metrics, *after.metrics], strict=True):
        for name in ("loss", "grad_norm", "kl_to_ref"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-5)
    assert after.canary == pytest.approx(alone.canary, abs=1e-5)
    assert team.checkpoint().keys() == {"model", "optimizer", "reference", "ref_logprobs"}
    assert team.checkpoint()["reference"].keys() == team.checkpoint()["model"].keys()
    assert alone.tensors.keys() == after.tensors.keys()
    for name, tensor in alone.tensors.items():
        torch.testing.assert_close(after.tensors[name], tensor, atol=1e-5, rtol=1e-5)
