"""The starting model: made by a program of its own, reproducible from a seed, complete or not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config import load_recipe, parse_recipe
from tba.config.sections import WarmStartSection
from tba.errors import ConfigError
from tba_cli.starter_models import starting_model
from tba_cli.starter_models.lessons import LESSONS
from tba_cli.starter_models.starting_model import build_model, build_tokenizer, make_starting_model
from tba_cli.starter_models.warm_start import run

BRIEF = WarmStartSection(task="addition", max_steps=20, noise_steps=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "a"
    make_starting_model(folder, BRIEF, seed=3, num_threads=1)
    return folder


def test_the_folder_loads_as_a_hugging_face_model(made: Path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000
    ids = tokenizer("47+85=")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "47+85="
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(made: Path, tmp_path: Path):
    make_starting_model(tmp_path / "same", BRIEF, seed=3, num_threads=1)
    make_starting_model(tmp_path / "other", BRIEF, seed=4, num_threads=1)
    first, same, other = (load_file(f / "model.safetensors") for f in (made, tmp_path / "same", tmp_path / "other"))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_report_says_how_it_was_made(made: Path):
    report = json.loads((made / "warmstart.json").read_text())
    assert report["settings"] == BRIEF.model_dump(mode="json")
    assert report["seed"] == 3
    assert report["num_school_steps"] == 20
    assert not list(made.parent.glob(".*"))


def test_a_task_without_a_warm_start_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="'chess' has no warm start"):
        make_starting_model(tmp_path / "x", WarmStartSection(task="chess"), seed=0, num_threads=1)


def test_the_second_task_has_two_sizes_and_the_same_seed_gives_the_same_bits(tmp_path: Path):
    brief = WarmStartSection(task="chain", size="0.3m", max_steps=3, noise_steps=2)
    reports = [make_starting_model(tmp_path / name, brief, seed=3, num_threads=1) for name in ("a", "b")]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 300_000 < reports[0]["num_parameters"] < 400_000
    large = make_starting_model(
        tmp_path / "c", brief.model_copy(update={"size": "3m", "max_steps": 1, "noise_steps": 0}), seed=3, num_threads=1
    )
    assert 2_900_000 < large["num_parameters"] < 3_100_000


def test_answers_to_prompts_of_different_lengths_have_the_probability_of_each_alone():
    lesson = LESSONS["tally"]
    tokenizer = build_tokenizer(lesson)
    torch.manual_seed(0)
    model = build_model(tokenizer, lesson, lesson.shape(None))
    pairs = lesson.validation()[:6]
    assert len({len(prompt) for prompt, _ in pairs}) > 1
    inputs, answers = starting_model._encode(pairs, tokenizer)
    assert (answers >= 0).sum(dim=1).tolist() == [len(response) + 1 for _, response in pairs]
    with torch.no_grad():
        together = starting_model._answer_logprobs(model, inputs, answers).sum(dim=1)
        alone = [starting_model._answer_logprobs(model, *starting_model._encode([pair], tokenizer)) for pair in pairs]
    torch.testing.assert_close(together, torch.stack([each.sum() for each in alone]), rtol=1e-4, atol=1e-3)
    assert tokenizer.unk_token_id not in inputs


def test_the_task_with_the_long_tail_makes_its_model(tmp_path: Path):
    brief = WarmStartSection(task="tally", max_steps=1, noise_steps=1)
    report = make_starting_model(tmp_path / "tally", brief, seed=0, num_threads=1)
    assert 2_900_000 < report["num_parameters"] < 3_100_000
    recipe = load_recipe(Path(__file__).parents[3] / "recipes" / "tally.toml")
    longest = recipe.searcher.max_prompt_tokens + recipe.searcher.max_response_tokens
    assert longest <= json.loads((tmp_path / "tally" / "config.json").read_text())["max_position_embeddings"]


def test_a_size_that_the_task_does_not_have_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model.warm_start.size is '3m'; this task has the sizes 0.1m$"):
        make_starting_model(tmp_path / "x", WarmStartSection(task="addition", size="3m"), seed=0, num_threads=1)


def test_a_recipe_without_the_section_is_one_sentence():
    document = {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"generator": "addition"}}
    with pytest.raises(ConfigError, match=r"no \[model.warm_start\] section"):
        run(parse_recipe(document, where="test"))
