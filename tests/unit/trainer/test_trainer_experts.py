"""Mixtures of experts: their products run in the compute dtype, and nothing but the objective is trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from torch import Tensor

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
