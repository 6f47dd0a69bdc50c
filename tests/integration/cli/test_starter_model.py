"""The starting model: made by a program of its own, reproducible from a seed, complete or not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config import parse_recipe
from tba.errors import ConfigError
from tba_cli.starter_models.starting_model import make_starting_model
from tba_cli.starter_models.warm_start import run

BRIEF = {"num_threads": 1, "target_accuracy": 0.001, "noise_steps": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "a"
    make_starting_model(folder, seed=3, **BRIEF)
    return folder


def test_the_folder_loads_as_a_hugging_face_model(made: Path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000
    ids = tokenizer("47+85=")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "47+85="
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(made: Path, tmp_path: Path):
    make_starting_model(tmp_path / "same", seed=3, **BRIEF)
    make_starting_model(tmp_path / "other", seed=4, **BRIEF)
    first, same, other = (load_file(f / "model.safetensors") for f in (made, tmp_path / "same", tmp_path / "other"))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_report_says_how_it_was_made(made: Path):
    report = json.loads((made / "warmstart.json").read_text())
    assert report["seed"] == 3
    assert 0 < report["num_clean_steps"] <= 100
    assert not list(made.parent.glob(".*"))


def test_a_recipe_without_the_section_is_one_sentence():
    document = {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"generator": "addition"}}
    with pytest.raises(ConfigError, match=r"no \[model.warm_start\] section"):
        run(parse_recipe(document, where="test"))
