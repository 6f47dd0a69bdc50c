"""The canary's tolerance: it follows how much the trainer's own log-probs change when the weights are rounded."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_trainer.checkpoints.canary import (
    EIGHT_BIT_TOLERANCE,
    MAX_TOLERANCE,
    MIN_TOLERANCE,
    NUM_CANDIDATES,
    CanaryMaker,
    tolerance,
)
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import compile_layers, frozen_copy, load_policy
from torch._dynamo.testing import CompileCounterWithBackend

from tba.config import Recipe
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import make_recipe


def tolerance_of(recipe: Recipe, factor: float) -> float:
    """Of a model whose logits are multiplied: larger ones have larger roundings."""
    theta = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    with torch.no_grad():
        theta.get_output_embeddings().weight.mul_(factor)
    return CanaryMaker(theta, frozen_copy(theta, torch.bfloat16), recipe).make().tolerance


@pytest.mark.parametrize(
    ("gap", "expected"), [(0.0, 0.25), (0.05, 0.25), (0.1, 0.4), (0.5, 1.0), (math.inf, 1.0), (math.nan, 0.25)]
)
def test_a_tolerance_stays_within_its_bounds(gap: float, expected: float) -> None:
    assert tolerance(gap, least=0.25, most=1.0) == pytest.approx(expected)


def test_weights_that_round_more_get_a_larger_tolerance(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    recipe = make_recipe(folder, model={"dtype": "bfloat16"})
    found = [tolerance_of(recipe, factor) for factor in (0.1, 3.0, 60.0)]
    assert found[0] == MIN_TOLERANCE["bfloat16"] < found[1] < found[2] == MAX_TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("engine", "vllm", "expected"),
    [
        ("vllm", {}, MIN_TOLERANCE["bfloat16"]),
        ("vllm", {"quantization": "fp8_per_block"}, EIGHT_BIT_TOLERANCE),
        ("embedded", {"quantization": "fp8_per_block"}, MIN_TOLERANCE["bfloat16"]),
    ],
)
def test_an_engine_with_8_bits_may_be_off(folder: Path, engine: str, vllm: dict[str, str], expected: float) -> None:
    recipe = make_recipe(folder, model={"dtype": "bfloat16"}, searcher={"engine": engine, "vllm": vllm})
    assert tolerance_of(recipe, 0.1) == expected  # little rounding: the least tolerance decides


def test_the_canary_is_the_candidate_that_rounding_changes_least(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture="qwen3_moe", hidden_size=32)
    recipe = make_recipe(folder, model={"dtype": "bfloat16"})
    theta = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    published = frozen_copy(theta, torch.bfloat16)
    canary = CanaryMaker(theta, published, recipe).make()
    gaps = {}
    for seed in range(NUM_CANDIDATES):
        tokens = np.random.default_rng(seed).integers(0, theta.config.vocab_size, 16, dtype=np.int32)
        sequences = pack_sequences([tokens[:8]], [tokens[8:]], "cpu")
        with torch.no_grad():
            wide, rounded = (LogprobModel(m, temperature=1.0).token_logprobs(sequences) for m in (theta, published))
        gaps[tuple(tokens.tolist())] = float((wide - rounded).abs().max())
    chosen = gaps[*canary.prompt_tokens, *canary.response_tokens]
    assert max(gaps.values()) > 5 * min(gaps.values()), "no token goes to other experts"
    assert chosen < 1.5 * min(gaps.values())  # in one pass with the others it rounds a little differently


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_a_canary_compiles_nothing(folder: Path) -> None:
    recipe = make_recipe(folder, model={"dtype": "bfloat16"}, trainer={"compile": True})
    theta = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    published = frozen_copy(theta, torch.bfloat16)
    backend = CompileCounterWithBackend("eager")
    compile_layers(theta, backend=backend)  # type: ignore[arg-type]
    CanaryMaker(theta, published, recipe).make()
    assert backend.frame_count == 0
    tokens = np.arange(8, dtype=np.int32)
    with torch.no_grad():
        LogprobModel(theta, temperature=1.0).token_logprobs(pack_sequences([tokens], [tokens], "cpu"))
    assert backend.frame_count > 0, "the passes after it are not compiled"


def test_in_float32_nothing_is_rounded_and_the_tolerance_is_the_least(folder: Path, model: Any) -> None:
    theta = copy.deepcopy(model)  # its attention is replaced
    assert CanaryMaker(theta, theta, make_recipe(folder)).make().tolerance == MIN_TOLERANCE["float32"]
