"""Mixtures of experts: their products run in the compute dtype, and nothing but the objective is trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import compile_layers, prepare
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.model_families import make_family_model
from tests.unit.trainer.test_trainer_packing import gradient, some_tokens


def test_autocast_reaches_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = (make_family_model("qwen3_moe") for _ in range(2))
    grouped_mm, seen = torch.nn.functional.grouped_mm, set()

    def note(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
        seen.add((left.dtype, right.dtype))
        return grouped_mm(left, right, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", note)
    sequences = pack_sequences(*some_tokens(), "cpu")
    exact = gradient(plain, LogprobModel(plain, temperature=0.7).token_logprobs(sequences))
    assert seen == {(torch.float32, torch.float32)}
    seen.clear()
    policy = LogprobModel(copy.deepcopy(model), temperature=0.7, autocast_dtype=torch.bfloat16)
    found = gradient(policy.model, policy.token_logprobs(sequences))
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert found.dtype == torch.float32
    assert 0.98 < torch.nn.functional.cosine_similarity(found, exact, dim=0) < 1
    logits = model(input_ids=sequences.input_ids).logits  # the mode of experts is one of the model, not of all
    assert torch.equal(logits, make_family_model("qwen3_moe")(input_ids=sequences.input_ids).logits)


def test_no_loss_of_the_router_is_trained() -> None:
    """Also where config.json asks for its logits, with which transformers adds a loss beside its own."""
    model = make_family_model("qwen3_moe")
    model.config.output_router_logits = True
    plain = make_family_model("qwen3_moe")
    sequences = pack_sequences(*some_tokens(), "cpu")
    gradients = [gradient(m, LogprobModel(m, temperature=0.7).token_logprobs(sequences)) for m in (model, plain)]
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize(("recomputed", "autocast_dtype"), [(True, torch.bfloat16), (True, None)])
def test_layers_with_experts_are_compiled_and_computed_again(
    recomputed: bool, autocast_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their products are those of layers that are not compiled: a layer that is computed again has the same."""
    model = make_family_model("qwen3_moe")
    plain = copy.deepcopy(model)
    policy = LogprobModel(prepare(model, None, recomputed), temperature=1.0, autocast_dtype=autocast_dtype)
    backend = CompileCounterWithBackend("eager")
    compile_layers(model, backend=backend)  # type: ignore[arg-type]
    grouped_mm, dtypes = torch.nn.functional.grouped_mm, list[torch.dtype]()

    def note(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
        dtypes.append(left.dtype)
        return grouped_mm(left, right, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", note)
    sequences = pack_sequences(*some_tokens(), "cpu")
    found = gradient(model, policy.token_logprobs(sequences))
    assert backend.frame_count > 0
    # two products of the one layer that has experts, twice
    assert dtypes == [autocast_dtype or torch.float32] * 4
    expected = LogprobModel(plain, temperature=1.0, autocast_dtype=autocast_dtype).token_logprobs(sequences)
    torch.testing.assert_close(found, gradient(plain, expected), atol=1e-5, rtol=1e-5)
