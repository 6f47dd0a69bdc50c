"""The traced memory of a step: full recipes, a real step beside its trace, models of few layers beside whole ones."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.learner.learner import Learner, trainer_rng
from tba_trainer.memory_trace import step as memory_trace
from tba_trainer.memory_trace.fake_device import LiveBytes, cuda_branches
from tba_trainer.memory_trace.step import StepBytes, trace_recipe, trace_step
from tba_trainer.model.policy import load_policy

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.sizing.gpu_layout import CARD_GIB, GIB, USABLE_SHARE
from tba_cli.sizing.model_shape import shape_of_folder
from tests.support.model_shapes import SHAPES
from tests.support.tiny_model import Architecture, make_tiny_model
from tests.support.trainer_values import make_recipe

ROOT = Path(__file__).parents[3]
FULL = ("gsm8k", "math", "tldr", "tldr-1b", "tldr-2.8b", "redteam", "redteam-llama")


def recipe_of(name: str, *sets: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.toml", sets=list(sets), environ={})


@pytest.fixture(scope="module", autouse=True)
def shared_traces() -> Iterator[None]:
    """Trace each recipe with each number of layers once; without FSDP2 one layer less: the line is the same."""
    found: dict[tuple[str, int, str], StepBytes] = {}

    def trace(recipe: Recipe, config: Mapping[str, Any], *, num_layers: int) -> StepBytes:
        settings = (recipe.model.path, recipe.trainer.gradient_checkpointing, recipe.trainer.sharding.context)
        key = (recipe.run.name, num_layers, repr(settings))
        if key not in found:
            found[key] = trace_step(recipe, config, num_layers=num_layers)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_trace, "trace_step", trace)
        patch.setattr(memory_trace, "LAYERS", (1, 2))
        yield


@pytest.mark.nightly
@pytest.mark.parametrize("name", FULL)
def test_a_full_recipe_fits(name: str) -> None:
    recipe = recipe_of(name)
    shape = SHAPES[recipe.model.path]
    found = trace_recipe(recipe, shape.config)
    if recipe.model.lora is None:
        assert found.parameters * recipe.trainer.num_processes == pytest.approx(4 * shape.num_params, rel=1e-3)
    assert found.peak <= USABLE_SHARE * CARD_GIB * GIB


@pytest.mark.parametrize("num", [7, 9, 10])
def test_every_rollout_of_the_trace_has_its_pass(num: int) -> None:
    """What is left of a group in the largest micro-batches may be one rollout: alone it would be tied."""
    recipe = recipe_of("quickstart", "objective.preset=kimi", f"trainer.micro_batch_tokens={13 * num}")
    groups = memory_trace._batch(recipe, vocab_size=16).groups
    assert sum(len(group.rollouts) for group in groups) == 2 * num
    assert all(len({rollout.reward for rollout in group.rollouts}) > 1 for group in groups)


def test_models_of_few_layers_are_extended_along_the_line() -> None:
    recipe = recipe_of("tldr")
    shape = SHAPES[recipe.model.path]
    few = {**shape.config, "num_hidden_layers": 4}
    assert trace_recipe(recipe, few) == trace_step(recipe, shape.config, num_layers=4)


def test_a_tiny_model_of_two_processes_is_traced_to_its_last_tensor(tmp_path: Path) -> None:
    """All its tensors are smaller than those that are fake wherever they come from."""
    folder = make_tiny_model(tmp_path / "model", num_layers=1, vocab_size=64)
    recipe = make_recipe(folder, trainer={"num_processes": 2, "compute_dtype": "bfloat16", "micro_batch_tokens": 64})
    found = trace_recipe(recipe, json.loads((folder / "config.json").read_text()))
    shape = shape_of_folder(folder)
    # rotary embeddings have buffers, too
    assert found.gradients == 4 * shape.num_params / 2
    assert found.parameters == pytest.approx(found.gradients, rel=1e-3)
    assert found.optimizer == 2 * found.gradients


def test_processes_that_share_sequences_have_the_same_state_and_less_of_the_activations(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", num_layers=1, vocab_size=64)

    def traced(**settings: Any) -> StepBytes:
        trainer = {"num_processes": 2, "micro_batch_tokens": 1024, "sharding": settings}
        recipe = make_recipe(folder, trainer=trainer, searcher={"max_response_tokens": 512})
        return trace_recipe(recipe, json.loads((folder / "config.json").read_text()))

    alone, shared = traced(), traced(context=2)
    assert shared.state == alone.state
    assert shared.peak < 0.8 * alone.peak


def test_a_model_that_cannot_be_traced_gets_a_sentence() -> None:
    recipe = recipe_of("gsm8k")
    # under a name of its own: the traces of the recipe are shared
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": "bogus"})})
    with pytest.raises(ConfigError, match=r"builds no language model .*\(model_type 'bogus'\)"):
        trace_recipe(recipe, {"model_type": "bogus", "num_hidden_layers": 1})
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3, "vocab_size": 64}
    with pytest.raises(ConfigError, match="'llama' cannot be traced on fake tensors"):
        trace_recipe(recipe, {"model_type": "llama", "num_hidden_layers": 1, **sizes})


@pytest.mark.parametrize(
    ("architecture", "num_tokens", "sections"),
    [
        ("llama", 128, {"trainer": {"gradient_checkpointing": True}}),
        ("qwen2", 128, {"trainer": {"gradient_checkpointing": True}}),
        ("gpt_neox", 512, {"objective": {"preset": "tba_prime"}}),
        ("qwen2", 256, {"model": {"lora": {"rank": 4}}}),
    ],
)
def test_a_real_step_holds_what_its_trace_says(
    tmp_path: Path, architecture: Architecture, num_tokens: int, sections: dict[str, dict[str, Any]]
) -> None:
    sizes: dict[str, Any] = {"tied": architecture == "qwen2", "hidden_size": 128, "num_layers": 2, "vocab_size": 4096}
    folder = make_tiny_model(tmp_path / "model", architecture=architecture, **sizes)
    checkpointing = sections.get("trainer", {}).get("gradient_checkpointing", False)
    sampling = {"prompts_per_batch": 4, "group_size": 4, "rollouts_per_visit": 4}
    searcher = {"max_prompt_tokens": num_tokens // 4, "max_response_tokens": num_tokens - num_tokens // 4}
    # in float32: a CPU keeps no wide sums of products in 16 bits
    trainer = {"micro_batch_tokens": 4 * num_tokens, "gradient_checkpointing": checkpointing}
    recipe = make_recipe(folder, **{**sections, "sampling": sampling, "searcher": searcher, "trainer": trainer})
    config = json.loads((folder / "config.json").read_text())
    traced = trace_step(recipe, config, num_layers=2)
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=checkpointing)
    before = {id(value.untyped_storage()) for value in _tensors()}
    mine = {id(each.untyped_storage()) for each in [*model.parameters(), *model.buffers()]}

    def is_counted(tensor: torch.Tensor) -> bool:
        return id(tensor.untyped_storage()) in mine or id(tensor.untyped_storage()) not in before

    with cuda_branches(), LiveBytes(is_counted) as live:
        learner = Learner(model, recipe, trainer_rng(recipe))
        writer = WeightSnapshotWriter(model, recipe, folder=tmp_path)  # of the published copy with LoRA
        real = memory_trace.measured(learner, recipe, live)
        del writer
    assert real["forward_backward_peak"] == pytest.approx(traced.forward_backward_peak, rel=0.03)
    assert real["update_peak"] == pytest.approx(traced.update_peak, rel=0.01)


def _tensors() -> list[torch.Tensor]:
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
