"""The policy model: log-probs, the output layer, dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.model import policy as trainer_model
from tba_trainer.model.logprobs import LogprobModel, head_logprobs
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import load_policy
from transformers import AutoConfig, AutoModelForCausalLM

from tba.config.sections import ModelSection
from tba.errors import ConfigError
from tests.support.broken_weights import BREAKS, break_weights
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import VOCAB_SIZE
from tests.unit.trainer.test_trainer_packing import some_tokens


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), architecture=request.param, hidden_size=32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_bfloat16_autocast_is_close_and_answers_in_float32(model: Any) -> None:
    batch = pack_sequences(*some_tokens(vocab_size=VOCAB_SIZE), "cpu")
    exact = LogprobModel(model, temperature=1.0).token_logprobs(batch)
    fast = LogprobModel(model, temperature=1.0, autocast_dtype=torch.bfloat16).token_logprobs(batch)
    assert fast.dtype == torch.float32
    assert 0 < (fast - exact).abs().max() < 0.3


def test_gradient_checkpointing_changes_neither_values_nor_gradients(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    batch = pack_sequences(*some_tokens(vocab_size=VOCAB_SIZE), "cpu")
    results = []
    for gradient_checkpointing, passes in ((False, [1, 1]), (True, [2, 2])):
        model = load_policy(ModelSection(path=str(folder)), device="cpu", gradient_checkpointing=gradient_checkpointing)
        logprobs = LogprobModel(model, temperature=1.0)
        seen: list[Any] = []
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda mlp, _inputs, seen=seen: seen.append(mlp))
        values = logprobs.token_logprobs(batch)
        values.sum().backward()
        assert [seen.count(layer.mlp) for layer in model.model.layers] == passes
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((values.detach(), gradient))
    torch.testing.assert_close(*results, atol=0, rtol=0)


def random_head(*, dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[torch.Tensor, ...]:
    """Hidden states [7, 5], weight [11, 5], bias [11], targets [7]."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, 11, (7,), generator=generator)
    return random(7, 5), random(11, 5), random(11) if bias else None, targets  # type: ignore[return-value]


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) / 0.7
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk_bytes", [None, 3 * 11 * 8, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_formula(chunk_bytes: int | None, bias: bool) -> None:
    """One chunk of all 7 positions; chunks of 3; a bound too small for one position, which then goes alone."""
    hidden, weight, b, targets = random_head(bias=bias)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        h, w = inputs[:2]
        return head_logprobs(h, w, inputs[2] if bias else None, targets, temperature=0.7, chunk_bytes=chunk_bytes)

    inputs = (hidden, weight, b) if bias else (hidden, weight)
    torch.testing.assert_close(ours(*inputs), plain(hidden, weight, b, targets), atol=1e-12, rtol=1e-12)
    # a second backward pass computes the logits again: equal up to rounding
    assert torch.autograd.gradcheck(ours, inputs, nondet_tol=1e-10)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, bias, targets = random_head()
    head_logprobs(hidden, weight.detach(), bias.detach(), targets, temperature=1.0).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not head_logprobs(hidden, weight, bias, targets, temperature=1.0).requires_grad


def test_logits_too_large_to_exponentiate_are_no_problem() -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    values = head_logprobs(hidden, weight, None, torch.tensor([0, 0]), temperature=1.0)
    assert values.tolist() == [0.0, -2e4]
    values.sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("chunk_bytes", [None, 3 * 11 * 4])
def test_bfloat16_products_answer_in_float32(chunk_bytes: int | None) -> None:
    """Autocast over float32 weights, and bfloat16 weights: both near the exact values, gradients in the dtype of W."""
    exact = plain(*random_head())
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, bias, targets = random_head(dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = head_logprobs(hidden, weight, bias, targets, temperature=0.7, chunk_bytes=chunk_bytes)
        assert values.dtype == torch.float32
        assert 0 < (values.double() - exact).abs().max() < 0.1
        values.sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
        wide_hidden, wide_weight, wide_bias, _ = random_head()
        plain(wide_hidden, wide_weight, wide_bias, targets).sum().backward()
        assert wide_weight.grad is not None
        gradients = weight.grad.double().flatten(), wide_weight.grad.flatten()
        assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.999


# Dropout is off in train mode, which gradient checkpointing needs, also in families that have no dropout module.
_OF_ALL = {"vocab_size": 37, "hidden_size": 16, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"num_hidden_layers": 2, "ffn_dim": 32, "max_position_embeddings": 32, "word_embed_proj_dim": 16}
    | dict.fromkeys(("dropout", "attention_dropout", "layerdrop"), 0.3),
    "bloom": {"n_layer": 2, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    "falcon": {"num_hidden_layers": 2, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    "gpt2": {"n_layer": 2, "n_positions": 32, "attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3},
}


def folder_of(family: str, folder: Path) -> Path:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = AutoConfig.for_model(family, **_OF_ALL, **FAMILIES[family], **tokens, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_in_train_mode_are_those_of_the_policy_that_samples(family: str, tmp_path: Path) -> None:
    section = ModelSection(path=str(folder_of(family, tmp_path / "model")))
    model = load_policy(section, device="cpu", gradient_checkpointing=True)
    still = load_policy(section, device="cpu", gradient_checkpointing=False)
    assert model.training
    assert not still.training
    ids = torch.arange(24).view(2, 12)
    expected = still(input_ids=ids, use_cache=False).logits
    for _ in range(3):
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)


def test_a_model_that_is_still_random_in_train_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = ModelSection(path=str(folder_of("opt", tmp_path / "model")))
    monkeypatch.setattr(trainer_model, "disable_dropout", lambda model: None)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing = true .* gives different logits \(by up to"):
        load_policy(section, device="cpu", gradient_checkpointing=True)
    assert not load_policy(section, device="cpu", gradient_checkpointing=False).training


def test_the_check_at_start_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    section = ModelSection(path=str(folder_of("opt", tmp_path / "model")))
    drawn = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        load_policy(section, device="cpu", gradient_checkpointing=checkpointing)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("how", BREAKS)
def test_a_policy_without_its_own_weights_is_refused_with_their_names(how: str, tmp_path: Path) -> None:
    folder = break_weights(make_tiny_model(tmp_path / "model"), how)
    with pytest.raises(ConfigError, match=BREAKS[how]):
        load_policy(ModelSection(path=str(folder)), device="cpu", gradient_checkpointing=False)


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load_policy(ModelSection(path=str(folder)), device="cpu", gradient_checkpointing=False)
