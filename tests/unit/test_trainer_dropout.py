"""Dropout is off in train mode, which gradient checkpointing needs, also in families that have no dropout module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tba_trainer.model import policy as trainer_model
from tba_trainer.model.policy import load_policy
from transformers import AutoConfig, AutoModelForCausalLM

from tba.config.sections import ModelSection
from tba.errors import ConfigError

_OF_ALL = {"vocab_size": 37, "hidden_size": 16, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {
        "num_hidden_layers": 2,
        "ffn_dim": 32,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 16,
        "dropout": 0.3,
        "attention_dropout": 0.3,
        "layerdrop": 0.3,
    },
    "bloom": {"n_layer": 2, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    "falcon": {"num_hidden_layers": 2, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    "gpt2": {"n_layer": 2, "n_positions": 32, "attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3},
}


def folder_of(family: str, folder: Path) -> Path:
    config = AutoConfig.for_model(
        family, **_OF_ALL, **FAMILIES[family], initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=1
    )
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
    with pytest.raises(ConfigError, match=r"gradient_checkpointing = true .* gives other logits \(by up to"):
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
