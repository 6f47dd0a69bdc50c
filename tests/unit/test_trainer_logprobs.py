"""Trainer log-probs under precision, checkpointing, odd tokens. Packed against alone: test_trainer_packing.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_trainer.model import logprobs as trainer_logprobs
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import load_policy
from transformers import AutoModelForCausalLM

from tba.config.sections import ModelSection
from tests.support.tiny_model import EOS_ID, PAD_ID, make_tiny_model
from tests.support.trainer_values import VOCAB_SIZE

LENGTHS = [(5, 7), (2, 3), (9, 1), (1, 12)]


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), architecture=request.param, hidden_size=32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def some_sequences(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB_SIZE, p).astype(np.int32) for p, _ in LENGTHS]
    responses = [rng.integers(0, VOCAB_SIZE, r).astype(np.int32) for _, r in LENGTHS]
    return prompts, responses


def alone(model: Any, prompt: np.ndarray, response: np.ndarray, temperature: float) -> torch.Tensor:
    """Log-probs of one response, with nothing but the model's own forward pass."""
    ids = torch.tensor(np.concatenate([prompt, response]))[None, :].long()
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0] / temperature
    table = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return table[torch.arange(len(response)), torch.tensor(response).long()]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_sequences_give_what_each_gives_alone(model: Any, temperature: float) -> None:
    prompts, responses = some_sequences()
    found = LogprobModel(model, temperature=temperature).token_logprobs(pack_sequences(prompts, responses, "cpu"))
    expected = [
        alone(model, prompt, response, temperature) for prompt, response in zip(prompts, responses, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_other_sequences_do_not_change_a_gradient(model: Any) -> None:
    prompts, responses = some_sequences()

    def gradient(rows: list[int]) -> torch.Tensor:
        model.zero_grad()
        policy = LogprobModel(model, temperature=1.0)
        batch = pack_sequences([prompts[i] for i in rows], [responses[i] for i in rows], "cpu")
        policy.token_logprobs(batch)[batch.row == rows.index(1)].sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    torch.testing.assert_close(gradient([0, 1, 2, 3]), gradient([1]), atol=1e-5, rtol=1e-4)


def test_eos_and_pad_ids_inside_a_response_are_tokens_like_any_other(model: Any) -> None:
    prompt = np.array([PAD_ID, 5, EOS_ID], dtype=np.int32)
    response = np.array([7, PAD_ID, EOS_ID, EOS_ID], dtype=np.int32)
    filler = np.array([9] * 8, dtype=np.int32)
    batch = pack_sequences([prompt, filler], [response, filler], "cpu")
    assert len(batch.response_tokens) == 12
    found = LogprobModel(model, temperature=1.0).token_logprobs(batch)
    torch.testing.assert_close(found[:4], alone(model, prompt, response, 1.0), atol=1e-5, rtol=1e-5)
    assert (found[:4] < 0).all()


def test_chunks_of_the_output_head_give_the_same_values_and_gradients(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pack_sequences(*some_sequences(), "cpu")

    def values_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        values = LogprobModel(model, temperature=0.7).token_logprobs(batch)
        (values * torch.arange(23.0)).sum().backward()
        return values.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = values_and_gradient()
    monkeypatch.setattr(trainer_logprobs, "CHUNK_BYTES", {"cpu": 5 * 4 * VOCAB_SIZE})
    chunked = values_and_gradient()
    torch.testing.assert_close(chunked, whole, atol=1e-4, rtol=1e-4)


def test_bfloat16_autocast_is_close_and_answers_in_float32(model: Any) -> None:
    batch = pack_sequences(*some_sequences(), "cpu")
    exact = LogprobModel(model, temperature=1.0).token_logprobs(batch)
    fast = LogprobModel(model, temperature=1.0, autocast_dtype=torch.bfloat16).token_logprobs(batch)
    assert fast.dtype == torch.float32
    assert 0 < (fast - exact).abs().max() < 0.3


def test_gradient_checkpointing_changes_neither_values_nor_gradients(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    batch = pack_sequences(*some_sequences(), "cpu")
    results = []
    for gradient_checkpointing in (False, True):
        model = load_policy(ModelSection(path=str(folder)), device="cpu", gradient_checkpointing=gradient_checkpointing)
        assert model.is_gradient_checkpointing is gradient_checkpointing
        values = LogprobModel(model, temperature=1.0).token_logprobs(batch)
        values.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((values.detach(), gradient))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)
