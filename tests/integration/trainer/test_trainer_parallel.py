"""Several gloo processes with a sharded model against one process with the whole: the same training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.checkpoints import weight_files
from tba_trainer.memory_trace.step import trace_recipe

from tba.config import Recipe, load_recipe
from tests.support.tiny_model import Architecture, make_tiny_model
from tests.support.trainer_team import Trained, run_alone, run_team
from tests.support.trainer_values import make_recipe

NUM_STEPS = 3
TOLERANCE = 1e-5
MICRO_BATCH_TOKENS = 24
"""Groups of the recorded batches have 20 to 60 tokens: they span micro-batches and processes."""


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", 20_000)


def recipe_of(folder: Path, architecture: Architecture, tied: bool, **sections: dict[str, Any]) -> Recipe:
    model = make_tiny_model(folder / "model", architecture=architecture, tied=tied, hidden_size=32)
    trainer = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "learning_rate": {"value": 1e-3}}
    objective = {"preset": "tba_prime", "reference_reset_steps": 2, "beta": {"value": 0.1}}
    usual: dict[str, dict[str, Any]] = {"trainer": trainer, "objective": objective}
    merged = {name: {**values, **sections.pop(name, {})} for name, values in usual.items()}
    return make_recipe(model, **merged, **sections)


def assert_same_training(one: Trained, two: Trained) -> None:
    for ours, theirs in zip(one.metrics, two.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            other = theirs[name]
            if value is None or other is None:
                assert value is other, name
            else:
                assert math.isclose(value, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (name, value, other)
    assert one.tensors.keys() == two.tensors.keys()
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(two.tensors[name], tensor, atol=TOLERANCE, rtol=TOLERANCE)


def test_two_processes_train_as_one_and_one_continues_from_their_checkpoint(tmp_path: Path) -> None:
    """With groups that span micro-batches and processes, a reference that is reset, and files of bounded size. The two
    processes have compiled their layers."""
    recipe = recipe_of(tmp_path, "llama", False)
    one = run_alone(tmp_path / "one", recipe, num_steps=NUM_STEPS)
    compiled = recipe_of(tmp_path, "llama", False, trainer={"compile": True})
    two = run_team(tmp_path / "two", compiled, num_ranks=2, num_steps=NUM_STEPS)
    assert_same_training(one, two)
    assert one.num_computed == two.num_computed  # all processes know the ref log-probs that one computed
    names = [f"model-{number:05d}-of-{len(two.paths):05d}.safetensors" for number in range(1, len(two.paths) + 1)]
    assert [path.name for path in two.paths] == names  # of the shares of both
    assert max(path.stat().st_size for path in two.paths) < weight_files.FILE_BYTES + 4096  # and the header
    assert len(two.paths) > 1

    # 2 -> 1; 1 -> 2 is below, to the bit
    expected = run_alone(tmp_path / "one-one", recipe, num_steps=NUM_STEPS, resume=one)
    back = run_alone(tmp_path / "two-one", recipe, num_steps=NUM_STEPS, resume=two)
    assert_same_training(expected, back)


@pytest.mark.nightly
def test_four_processes_that_share_sequences_train_as_one(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "qwen2", True, trainer={"sharding": {"context": 2}})
    one = run_alone(tmp_path / "one", recipe, num_steps=NUM_STEPS)
    four = run_team(tmp_path / "four", recipe, num_ranks=4, num_steps=NUM_STEPS)
    assert_same_training(one, four)
    assert distance(one, four, "optimizer") < 1e-5
    assert four.deadlines_s == [120.0]  # the team's deadline, not torch's


def gap(one: Trained, two: Trained) -> float:
    """Return the distance of all first moments together, as a share of their norm."""
    ours, theirs = (each.checkpoint()["optimizer"] for each in (one, two))
    names = [name for name in ours if name.startswith("exp_avg.")]
    squares = sum(float((theirs[name] - ours[name]).square().sum()) for name in names)
    return math.sqrt(squares / sum(float(ours[name].square().sum()) for name in names))


def distance(one: Trained, two: Trained, section: str) -> float:
    """Return the largest difference of a tensor of a checkpoint's section, as a share of its norm."""
    ours, theirs = one.checkpoint()[section], two.checkpoint()[section]
    assert ours.keys() == theirs.keys()
    return max(float((theirs[name] - tensor).norm() / tensor.norm()) for name, tensor in ours.items())


@pytest.mark.nightly
def test_the_math_recipe_trains_alike_in_several_processes_with_and_without_recomputation(tmp_path: Path) -> None:
    """recipes/math.toml as it is, but for a tiny model, the CPU, two processes, small micro-batches and an early reset.

    Two processes differ from one by the order of sums in float32: 3e-7 of the moments, 2e-6 of weights that began as 0
    (5e-5 on a processor without AVX-512: Adam divides small moments by small ones).
    bfloat16 differs from float32 by 0.6 % of the loss, 1.5 % of the gradient's norm, and 2.3 % of the moments; with
    several processes, which see all weights in 16 bits, not only those of matrix products, by 0.6, 0.8 and 2.2 % in two
    and 0.7, 0.8 and 2.2 % in four (measured, 2026-11-26).
    """
    model = make_tiny_model(tmp_path / "model", architecture="qwen2", hidden_size=32)
    changes = [f"model.path={model}", "trainer.device=cpu", "trainer.num_processes=2"]
    changes += [f"trainer.micro_batch_tokens={MICRO_BATCH_TOKENS}", "objective.reference_reset_steps=2"]
    recipes = {
        (dtype, recomputes): load_recipe(
            "recipes/math.toml",
            environ={},
            sets=[*changes, f"trainer.compute_dtype={dtype}", f"trainer.gradient_checkpointing={recomputes}"],
        )
        for dtype in ("bfloat16", "float32")
        for recomputes in ("true", "false")
    }
    assert load_recipe("recipes/math.toml", environ={}, sets=changes) == recipes["bfloat16", "true"]
    one = {case: run_alone(tmp_path / "-".join(case), recipes[case], num_steps=NUM_STEPS) for case in recipes}
    exact = one["float32", "false"]
    two = run_team(tmp_path / "float32", recipes["float32", "false"], num_ranks=2, num_steps=NUM_STEPS)
    assert_same_training(exact, two)
    assert distance(exact, two, "optimizer") < 1e-6
    assert distance(exact, two, "model") < 5e-4
    shared = recipes["bfloat16", "true"].model_dump(mode="json")
    # two groups, which share every sequence: with twice the tokens as many passes as two processes
    shared["trainer"] |= {"num_processes": 4, "sharding": {"context": 2}, "micro_batch_tokens": 2 * MICRO_BATCH_TOKENS}
    four = Recipe.model_validate(shared)
    rounded = run_team(tmp_path / "bfloat16", four, num_ranks=4, num_steps=NUM_STEPS)
    # the recipe's own settings, in two processes
    both = run_team(tmp_path / "both", recipes["bfloat16", "true"], num_ranks=2, num_steps=NUM_STEPS)
    for team in (both, rounded):
        assert 0 < gap(exact, team) < 2 * gap(exact, one["bfloat16", "true"])
    for dtype in ("bfloat16", "float32"):
        assert distance(one[dtype, "true"], one[dtype, "false"], "optimizer") == 0
    for fast in (one["bfloat16", "true"], both, rounded):
        for ours, theirs in zip(exact.metrics, fast.metrics, strict=True):
            assert (theirs["loss"], theirs["grad_norm"]) == pytest.approx((ours["loss"], ours["grad_norm"]), rel=0.05)
            assert theirs["grad_norm"] != ours["grad_norm"]


def test_a_restored_checkpoint_is_to_the_bit_what_the_other_number_of_processes_saved(tmp_path: Path) -> None:
    """No step between restore and capture: weights, moments, reference and cache go through the shards unchanged. Tied
    weights, bfloat16 published, activations recomputed."""
    recipe = recipe_of(tmp_path, "qwen2", True, model={"dtype": "bfloat16"}, trainer={"gradient_checkpointing": True})
    one = run_alone(tmp_path / "one", recipe, num_steps=NUM_STEPS)
    sharded = run_team(tmp_path / "sharded", recipe, num_ranks=2, num_steps=0, resume=one)
    saved, again = one.checkpoint(), sharded.checkpoint()
    assert saved.keys() == again.keys() == {"model", "optimizer", "ref_logprobs", "reference"}
    for section, tensors in saved.items():
        assert tensors.keys() == again[section].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again[section][name]), (section, name)
    assert all(torch.equal(one.tensors[name], sharded.tensors[name]) for name in one.tensors)
    assert sharded.canary == pytest.approx(one.canary, abs=1e-5)


@pytest.mark.nightly
def test_an_objective_that_needs_everything_is_shared_by_two_processes(tmp_path: Path) -> None:
    """Ref log-probs per token, and behaviour log-probs computed again."""
    objective = {"preset": "tba_prime_published"}
    recipe = recipe_of(tmp_path, "llama", False, objective=objective)
    one = run_alone(tmp_path / "one", recipe, num_steps=NUM_STEPS)
    two = run_team(tmp_path / "two", recipe, num_ranks=2, num_steps=NUM_STEPS)
    assert_same_training(one, two)
    assert {"old_policy", "old_logprobs"} <= two.checkpoint().keys()
    expected = run_alone(tmp_path / "one-one", recipe, num_steps=NUM_STEPS, resume=one)
    back = run_alone(tmp_path / "two-one", recipe, num_steps=NUM_STEPS, resume=two)
    assert_same_training(expected, back)


@pytest.mark.nightly
def test_experts_are_sharded_too(tmp_path: Path) -> None:
    """Each process has a part of the experts of a layer; all are gathered for its pass, which is computed again."""
    recipe = recipe_of(tmp_path, "qwen3_moe", False, trainer={"gradient_checkpointing": True})
    one = run_alone(tmp_path / "one", recipe, num_steps=NUM_STEPS)
    two = run_team(tmp_path / "two", recipe, num_ranks=2, num_steps=NUM_STEPS)
    assert_same_training(one, two)
    start = load_file(Path(recipe.model.path) / "model.safetensors")
    for expert in range(8):
        for layer in range(2):
            trained = two.tensors[f"model.layers.{layer}.mlp.experts.down_proj"][expert]
            assert not torch.equal(trained, start[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"])
    assert not torch.equal(two.tensors["model.layers.1.mlp.gate.weight"], start["model.layers.1.mlp.gate.weight"])


@pytest.mark.nightly
@pytest.mark.parametrize(("checkpointing", "vocab_size"), [(False, 2048), (True, 64)])
def test_a_rank_holds_what_tba_sizing_says(tmp_path: Path, checkpointing: bool, vocab_size: int) -> None:
    """Two processes in bfloat16, counted tensor by tensor, beside the trace of the step."""
    model = make_tiny_model(tmp_path / "model", hidden_size=128, num_layers=8, vocab_size=vocab_size)
    trainer = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "compute_dtype": "bfloat16", "num_processes": 2}
    # the longest micro-batches of the trace are those of the recorded batches
    searcher = {"max_prompt_tokens": 5, "max_response_tokens": 19}
    recipe = make_recipe(model, searcher=searcher, trainer={**trainer, "gradient_checkpointing": checkpointing})
    measured = run_team(tmp_path / "two", recipe, num_ranks=2, num_steps=2, count_bytes=True).peak_bytes
    traced = trace_recipe(recipe, json.loads((model / "config.json").read_text())).peak
    assert traced == pytest.approx(measured, rel=0.05), (traced, measured)
