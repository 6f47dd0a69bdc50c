"""LoRA: what is trained, what is published, and the reference that needs no second model; per family."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.learner.reference import AdapterWeights
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import PackedSequences, pack_sequences
from tba_trainer.model.parameters import (
    has_adapter,
    has_transposed_weights,
    is_adapted,
    plain_parameters,
    published_tensors,
    trainable,
)
from tba_trainer.model.policy import add_adapter, disable_dropout, frozen_copy

from tba.config.trainer import LoraSection
from tba.errors import ConfigError, TbaError
from tba.versions import START, PolicyVersion
from tba.weights.adapter import merged_blocks, read_adapter
from tba.weights.digest import open_tensors
from tba.wire.weight_manifest import Adapter, DeltaObject
from tests.support.model_families import PACKED, make_family_model
from tests.support.trainer_values import make_recipe
from tests.unit.trainer.test_trainer_packing import some_tokens

FAMILIES = [*(name for name in PACKED if " " not in name), "olmo2"]
SECTION = LoraSection(rank=4, alpha=12)


def some_sequences() -> PackedSequences:
    return pack_sequences(*some_tokens(), "cpu")


def adapted(name: str, section: LoraSection = SECTION, *, trained: bool = True) -> Any:
    model = make_family_model(name)
    torch.manual_seed(1)
    add_adapter(model, section)
    if trained:
        train(model)
    return model


def train(model: Any) -> None:
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(torch.randn_like(parameter) * 0.2)


def logprobs(model: Any) -> torch.Tensor:
    return LogprobModel(model, temperature=0.7).token_logprobs(some_sequences()).detach()


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_weights_compute_what_the_adapter_computes(name: str) -> None:
    start, model = make_family_model(name), adapted(name)
    expected = logprobs(model)
    assert not torch.allclose(expected, logprobs(copy.deepcopy(start)), atol=0.1)
    published = dict(published_tensors(model))
    assert list(published) == [parameter_name for parameter_name, _ in start.named_parameters()]
    merged = copy.deepcopy(start)
    merged.load_state_dict(published, strict=False)
    torch.testing.assert_close(logprobs(merged), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_but_the_head_has_an_adapter_and_nothing_else_is_trained(name: str) -> None:
    start, model = make_family_model(name), adapted(name)
    expected = {parameter_name for parameter_name, _ in start.named_parameters()}
    moved = {n for n, t in published_tensors(model) if not torch.equal(t, start.get_parameter(n))}
    kinds = ("Linear", "Conv1D")
    linear = {f"{n}.weight" for n, m in start.named_modules() if type(m).__name__ in kinds}
    head = next(f"{n}.weight" for n, m in start.named_modules() if m is start.get_output_embeddings())
    assert moved == linear - {head}
    assert all(".lora_" in n for n in trainable(model))
    assert plain_parameters(model).keys() == expected
    assert not any(parameter.requires_grad for parameter in plain_parameters(model).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_without_its_adapter_the_model_is_the_starting_model_bit_for_bit(name: str) -> None:
    expected = logprobs(make_family_model(name))
    model = adapted(name)
    policy = LogprobModel(model, temperature=0.7)
    theta = policy.token_logprobs(some_sequences())
    reference = AdapterWeights(model, policy)
    with reference.active():
        assert torch.equal(policy.token_logprobs(some_sequences()), expected)
    assert torch.equal(policy.token_logprobs(some_sequences()), theta)
    assert list(reference.tensors()) == []
    assert all(parameter.requires_grad for parameter in trainable(model).values())
    assert torch.equal(logprobs(frozen_copy(model)), expected)
    assert not has_adapter(frozen_copy(model))


def test_an_adapter_of_weights_of_both_orders_is_refused() -> None:
    models = [adapted(name) for name in ("gpt2", "llama")]
    assert list(map(has_transposed_weights, models)) == [True, False]
    with pytest.raises(ConfigError, match=r"name layers of one order in model\.lora\.target_modules"):
        has_transposed_weights(torch.nn.ModuleList(models))


def test_a_new_adapter_adds_exactly_nothing() -> None:
    assert torch.equal(logprobs(adapted("qwen2", trained=False)), logprobs(make_family_model("qwen2")))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_are_the_same_with_gradient_checkpointing(name: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = adapted(name)
        if checkpointing:
            disable_dropout(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        values = LogprobModel(model, temperature=0.7).token_logprobs(some_sequences())
        (values * torch.linspace(-1.0, 1.0, len(values))).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == trainable(adapted(name)).keys()
    for parameter_name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter_name], gradient)
        assert gradient.abs().max() > 0


def test_the_gradient_of_the_adapter_is_that_of_the_merged_weights() -> None:
    """d loss / d B = scaling * (d loss / d W) A^T, and the same for A, in float64."""
    model = adapted("llama").double()
    merged = make_family_model("llama").double()
    merged.load_state_dict(dict(published_tensors(model)), strict=False)
    for each in (model, merged):
        LogprobModel(each, temperature=0.7).token_logprobs(some_sequences()).sum().backward()
    layer = "model.layers.1.mlp.down_proj"
    weight = merged.get_parameter(f"{layer}.weight").grad
    a, b = (model.get_parameter(f"{layer}.lora_{x}.default.weight") for x in "AB")
    scaling = 12 / 4
    torch.testing.assert_close(b.grad, scaling * weight @ a.detach().T)
    torch.testing.assert_close(a.grad, scaling * b.detach().T @ weight)


def test_published_tensors_are_rounded_once() -> None:
    model = adapted("qwen2")
    whole, rounded = dict(published_tensors(model)), dict(published_tensors(model, torch.bfloat16))
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in whole.items())


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float32"), ("llama", "bfloat16"), ("qwen2", "float16")])
def test_whoever_merges_an_adapter_has_the_bits_of_the_canary(tmp_path: Path, name: str, dtype: str) -> None:
    model = adapted(name)
    recipe = make_recipe(tmp_path, model={"dtype": dtype, "lora": {"rank": SECTION.rank, "alpha": SECTION.alpha}})
    writer = WeightSnapshotWriter(model, recipe, folder=tmp_path)
    first = WeightSnapshotWriter(make_family_model(name), recipe, folder=tmp_path).take(START, None)
    first.write()
    start = open_tensors(first.paths)
    taken = writer.take(PolicyVersion(1, 1), START)
    assert taken.adapter is not None
    stored = DeltaObject(name="a", key="a", size_bytes=8, digest="0" * 32)
    file = taken.adapter
    adapter = Adapter(base="0-0", rank=file.rank, alpha=file.alpha, fan_in_fan_out=file.fan_in_fan_out, stored=stored)
    layers = read_adapter(adapter, file.path, start)
    published = dict(published_tensors(model))
    assert {f"{layer}.weight" for layer, module in model.named_modules() if is_adapted(module)} == layers.keys()
    for parameter_name, parameter in writer._published.named_parameters():
        raw, layer = start[parameter_name], layers.get(parameter_name)
        merged = raw[2] if layer is None else np.concatenate(list(merged_blocks(raw, layer)))
        assert torch.equal(parameter.reshape(-1).view(torch.uint8), torch.from_numpy(merged.copy()))
        # peft adds in float32, and rounds the sum once: the published base has been rounded before
        tolerance = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
        torch.testing.assert_close(parameter.float(), published[parameter_name], rtol=tolerance, atol=tolerance)


def test_a_reset_makes_the_adapter_as_it_is_now_the_reference() -> None:
    model = adapted("llama")
    policy = LogprobModel(model, temperature=0.7)
    reference = AdapterWeights(model, policy)
    reference.reset_to_theta()
    then = policy.token_logprobs(some_sequences()).detach()
    train(model)
    now = policy.token_logprobs(some_sequences()).detach()
    with reference.active():
        assert torch.equal(policy.token_logprobs(some_sequences()), then)
    assert torch.equal(policy.token_logprobs(some_sequences()), now)
    other = AdapterWeights(model, policy)  # after a resume
    other.load(dict(reference.tensors()), what="checkpoint 1-1")
    with other.active():
        assert torch.equal(policy.token_logprobs(some_sequences()), then)
    with pytest.raises(TbaError, match="checkpoint 1-1: its parameters are not those of the model"):
        other.load({"x": torch.zeros(1)}, what="checkpoint 1-1")


def test_the_weights_of_theta_come_back_when_a_pass_of_the_reference_fails() -> None:
    model = adapted("llama")
    policy = LogprobModel(model, temperature=0.7)
    now = policy.token_logprobs(some_sequences()).detach()
    for reset in (False, True):
        reference = AdapterWeights(model, policy)
        if reset:
            reference.reset_to_theta()
            train(model)
            now = policy.token_logprobs(some_sequences()).detach()
        with pytest.raises(RuntimeError, match="out of memory"), reference.active():
            raise RuntimeError("out of memory")
        assert torch.equal(policy.token_logprobs(some_sequences()), now)


def test_only_the_named_layers_get_an_adapter() -> None:
    model = adapted("llama", LoraSection(rank=2, target_modules=["q_proj", "v_proj"]))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(model)} == {"q_proj", "v_proj"}
    assert len(trainable(model)) == 2 * 2 * 2


@pytest.mark.parametrize("name", ["query", "lm_head", "embed_tokens"])
def test_a_layer_that_cannot_have_an_adapter_is_refused_with_those_that_can(name: str) -> None:
    section = LoraSection(target_modules=["q_proj", name])
    with pytest.raises(ConfigError, match=f"target_modules names '{name}'.*it has down_proj, gate_proj, k_proj"):
        add_adapter(make_family_model("llama"), section)


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="pip install peft"):
        add_adapter(make_family_model("llama"), SECTION)
