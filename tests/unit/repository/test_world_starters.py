"""The starting models of the worlds chain and tally: made by a seed, in the sizes that are named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.worlds.chain.prepare import lesson
from examples.worlds.starter import make
from examples.worlds.tally.prepare import LESSON as TALLY
from tba.config import load_recipe
from tba_cli.starter_models.starting_model import Pair, answer_logprobs, build_model, build_tokenizer, encode

TALLY_RECIPE = Path(__file__).parents[3] / "examples/worlds/tally/tally.toml"


def test_chain_has_two_sizes_and_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    brief = replace(lesson("0.3m"), max_steps=3, noise_steps=2)
    reports = [make(brief, tmp_path / name, seed=3) for name in ("a", "b")]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 300_000 < reports[0]["num_parameters"] < 400_000
    large = make(replace(lesson(), max_steps=1, noise_steps=0), tmp_path / "c", seed=3)
    assert 2_900_000 < large["num_parameters"] < 3_100_000


def test_the_first_phase_learns_from_clean_pairs_alone_and_the_second_from_noisy_ones(tmp_path: Path) -> None:
    brief, taken = replace(lesson("0.3m"), max_steps=3, noise_steps=2), Counter[str]()

    def counted(name: str, pairs: Iterator[Pair]) -> Iterator[Pair]:
        for pair in pairs:
            taken[name] += 1
            yield pair

    def demonstrations(seed: int) -> tuple[Iterator[Pair], Iterator[Pair]]:
        clean, noisy = brief.demonstrations(seed)
        return counted("clean", clean), counted("noisy", noisy)

    make(replace(brief, demonstrations=demonstrations), tmp_path / "a", seed=3)
    assert taken == {"clean": 3 * brief.batch_size, "noisy": 2 * brief.batch_size}


def test_answers_to_prompts_of_different_lengths_have_the_probability_of_each_alone() -> None:
    tokenizer = build_tokenizer(TALLY.characters, TALLY.max_length_tokens)
    torch.manual_seed(0)
    model = build_model(tokenizer, TALLY.shape)
    pairs = TALLY.validation()[:6]
    assert len({len(prompt) for prompt, _ in pairs}) > 1
    inputs, answers = encode(pairs, tokenizer)
    assert (answers >= 0).sum(dim=1).tolist() == [len(response) + 1 for _, response in pairs]
    with torch.no_grad():
        together = answer_logprobs(model, inputs, answers).sum(dim=1)
        alone = [answer_logprobs(model, *encode([pair], tokenizer)) for pair in pairs]
    torch.testing.assert_close(together, torch.stack([each.sum() for each in alone]), rtol=1e-4, atol=1e-3)
    assert tokenizer.unk_token_id not in inputs


def test_the_model_of_tally_has_room_for_the_longest_response(tmp_path: Path) -> None:
    report = make(replace(TALLY, max_steps=1, noise_steps=1), tmp_path / "tally", seed=0)
    assert 2_900_000 < report["num_parameters"] < 3_100_000
    searcher = load_recipe(TALLY_RECIPE).searcher
    longest = searcher.max_prompt_tokens + searcher.max_response_tokens
    assert longest <= json.loads((tmp_path / "tally" / "config.json").read_text())["max_position_embeddings"]
