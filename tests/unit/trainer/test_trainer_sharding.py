"""What a sharded model sends and in which dtype, as one of four processes whose group sends nothing."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.distributed.process_group import Team, mesh_of_all
from tba_trainer.learner.learner import Optimizer
from tba_trainer.model.context import Context
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.parameters import full
from tba_trainer.model.policy import frozen_copy
from tba_trainer.model.sharding import rounds_weights, run_as_forward, shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from tba.config import TrainerSection
from tba.errors import ConfigError
from tests.support.model_families import make_family_model
from tests.support.trainer_values import make_recipe

NUM_MICRO_BATCHES = 3
GATHER, REDUCE, ADD = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(family: str = "llama", compute_dtype: Any = "float32", context: int = 1) -> Any:
    model = make_family_model(family)
    shard(model, mesh_of_all("cpu"), compute_dtype=compute_dtype, context=Context.join(context))
    return model


def train_pass(policy: LogprobModel) -> None:
    tokens = [np.arange(1, 6, dtype=np.int32)]
    policy.token_logprobs(pack_sequences(tokens, tokens, "cpu")).sum().backward()


class CountedExchanges(TorchDispatchMode):
    """Counts the exchanges of torch.distributed by the name of their op, and keeps the dtypes of what they send."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.partition(".")[0]
            self.counts[name] += 1
            self.dtypes |= {(name, arg.dtype) for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def exchanges(context: int = 1) -> Counter[str]:
    model = sharded(context=context)
    policy = LogprobModel(model, temperature=1.0)
    with CountedExchanges() as counted:
        for _ in range(NUM_MICRO_BATCHES):
            train_pass(policy)
    assert all(parameter.grad is not None for parameter in model.parameters())
    return counted.counts


@pytest.mark.usefixtures("group")
def test_settings_say_how_often_a_layer_is_sent() -> None:
    num_units = 1 + len(make_family_model("llama").model.layers)
    whole, layers = NUM_MICRO_BATCHES * num_units, NUM_MICRO_BATCHES * (num_units - 1)
    assert exchanges() == {GATHER: whole + layers, REDUCE: whole}
    # keys and values of a layer, and the log-probs of a pass
    assert exchanges(context=2) == {GATHER: whole + 2 * layers, REDUCE: whole + layers, ADD: NUM_MICRO_BATCHES}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])  # gpt2: tied, two embeddings; both: LayerNorm
def test_weights_are_gathered_in_16_bits_and_updated_in_32(family: str, tmp_path: Path) -> None:
    model = sharded(family, "bfloat16")
    policy = LogprobModel(model, temperature=1.0, autocast_dtype=torch.bfloat16)
    layer = next(module for module in model.modules() if type(module).__name__.startswith("FSDP"))
    seen: list[Any] = []
    layer.register_forward_pre_hook(
        lambda module, args: seen.extend([args[0].dtype, *(p.dtype for p in module.parameters())])
    )
    assert run_as_forward(model, lambda: model.get_output_embeddings().weight.dtype) == torch.bfloat16
    with torch.no_grad():
        policy.token_logprobs(pack_sequences([np.arange(1, 4)], [np.arange(1, 4)], "cpu"))
    assert seen[0] == torch.float32  # the residual stream
    assert set(seen[1:]) == {torch.bfloat16}
    # after a pass without gradient nothing is left behind
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    with CountedExchanges() as counted:
        train_pass(policy)
    assert counted.dtypes == {(GATHER, torch.bfloat16), (REDUCE, torch.float32)}
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    # copies: the reference computes as theta does, the published one in the published dtype, also in float32
    assert rounds_weights(frozen_copy(model))
    for dtype in ("float32", "bfloat16"):
        recipe = make_recipe(tmp_path, model={"dtype": dtype})
        published = WeightSnapshotWriter(model, recipe, folder=tmp_path)._published
        found = run_as_forward(published, lambda published=published: published.get_output_embeddings().weight.dtype)
        assert found == getattr(torch, dtype)


def test_a_number_that_does_not_divide_the_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"trainer\.sharding\.context is 3, and this trainer has 4 processes"):
        Team.join(device="cpu", deadline_s=1.0, context=3)


def values_and_gradient(model: Any, autocast_dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    prompts, responses = ([rng.integers(0, 512, 40, dtype=np.int32) for _ in range(8)] for _ in range(2))
    policy = LogprobModel(model, temperature=1.0, autocast_dtype=autocast_dtype)
    values = policy.token_logprobs(pack_sequences(prompts, responses, "cpu")).float()
    (values * torch.from_numpy(rng.standard_normal(len(values))).float()).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    return values.detach(), torch.cat([full(grad).float().flatten() for grad in gradients if grad is not None])


def test_16_bits_cost_a_sharded_model_no_more_than_autocast_costs_one_process(tmp_path: Path) -> None:
    """Weights that 16 bits hold exactly, as those of most published models. ADR 30 has the numbers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    one, shards = copy.deepcopy(model), copy.deepcopy(model)
    narrow = frozen_copy(model, torch.bfloat16).requires_grad_(True)
    exact = values_and_gradient(model, None)

    def errors(other: Any, autocast_dtype: torch.dtype | None) -> tuple[float, float]:
        values, gradient = values_and_gradient(other, autocast_dtype)
        return float((values - exact[0]).abs().mean()), float((gradient - exact[1]).norm() / exact[1].norm())

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        shard(shards, mesh_of_all("cpu"), compute_dtype="bfloat16")
        of_shards = errors(shards, torch.bfloat16)
    finally:
        dist.destroy_process_group()
    for mine, autocast, all_narrow in zip(of_shards, errors(one, torch.bfloat16), errors(narrow, None), strict=True):
        assert 0 < mine < 1.1 * autocast
        assert all_narrow > 1.3 * autocast  # without the wide residual stream


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_fused_optimizer_of_gpus_makes_the_steps_of_the_plain_one(is_sharded: bool) -> None:
    """The CPU has it too. In one process it goes on from a checkpoint that the plain one has written."""

    def weights(fused_from: int) -> list[torch.Tensor]:
        model = sharded() if is_sharded else make_family_model("llama")
        optimizer, rng = Optimizer(model, TrainerSection()), torch.Generator().manual_seed(0)
        for step in range(4):
            if step == fused_from:
                saved = dict(optimizer.state_tensors())
                optimizer.use_fused()
                optimizer.load_state_tensors(saved)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                local_of(parameter.grad).normal_(generator=rng)
            optimizer.apply(learning_rate=1e-2)
        return [local_of(parameter).detach() for parameter in model.parameters()]

    # a group that sends nothing gathers no moments: there it begins fused
    torch.testing.assert_close(weights(0 if is_sharded else 2), weights(4), atol=1e-6, rtol=1e-6)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
