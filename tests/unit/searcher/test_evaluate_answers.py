"""The evaluator's own steps with a real engine and a real starting model: completions, perplexities, diversity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tba_searcher.engines.factory import build_engine
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.evaluation.answers import Answers, Score, answer_all
from tba_searcher.evaluation.perplexity import measure_likelihoods, perplexities
from tba_searcher.evaluation.results import EvaluationMetrics
from transformers import AutoModelForCausalLM

from tba.api import Prompt
from tba.config import Recipe
from tba.errors import ConfigError
from tba.versions import START
from tests.support.exports import transformers_greedy
from tests.support.tiny_encoder import make_tiny_encoder
from tests.support.tiny_model import EOS_ID, make_tiny_model
from tests.support.trainer_values import make_recipe

TEXTS = ["47+85=", "1+1=", "9" * 30, "12*3="]
TOO_LONG = 2
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), 5, hidden_size=32)


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Recipe:
    return recipe_for(folder, {"num_samples": 3, "perplexity": True})


@pytest.fixture(scope="module")
def answers(folder: Path, recipe: Recipe) -> Answers:
    return answer(folder, recipe)


def recipe_for(folder: Path, published: Mapping[str, Any], **sections: Any) -> Recipe:
    searcher = {"engine": "embedded", "num_slots": 4, "max_prompt_tokens": 12, "max_response_tokens": NUM_TOKENS}
    return make_recipe(folder, searcher=searcher, **{"eval": {"published": published}, **sections})


def answer(folder: Path, recipe: Recipe, asked: Sequence[Prompt] = ()) -> Answers:
    engine = build_engine(recipe, folder, START, None, seed=1)
    try:
        return answer_all(engine, TextCodec(folder), recipe, asked or prompts(), on_progress=lambda text: None)
    finally:
        engine.close()


def scored(answers: Answers, changes: Mapping[tuple[str, int, int], Score] = MappingProxyType({})) -> Answers:
    """Give every answer a score under the task `exact`: 1, or that of (mode, prompt, number) in `changes`."""
    for one in answers.answers:
        one.scores = {"exact": changes.get((one.mode, one.prompt, one.number), Score(1.0, None, "exact@1"))}
    return answers


def prompts() -> list[Prompt]:
    return [Prompt(prompt_id=f"p-{n}", task="exact", text=text, split="heldout") for n, text in enumerate(TEXTS)]


def test_greedy_completions_are_those_of_transformers_and_samples_differ(folder: Path, answers: Answers) -> None:
    expected = transformers_greedy(folder, TEXTS, num_tokens=NUM_TOKENS)
    for part, wanted in zip(answers.of("greedy"), expected, strict=True):
        if part:
            found = part[0].tokens.tolist()
            assert found == wanted[: len(found)]
            assert found[-1] == EOS_ID if part[0].finish_reason == "stop" else len(found) == NUM_TOKENS
    sampled = [tuple(answer.tokens.tolist()) for part in answers.of("sampled") for answer in part]
    assert len(set(sampled)) == len(sampled) == 9


def test_a_prompt_that_does_not_fit_is_refused_and_its_scores_are_unknown(recipe: Recipe, answers: Answers) -> None:
    assert list(answers.refused) == [TOO_LONG]
    assert "30 prompt tokens" in answers.refused[TOO_LONG]
    assert [len(part) for part in answers.of("greedy")] == [1, 1, 0, 1]
    measured = EvaluationMetrics(recipe, scored(answers))
    counts = measured.report("sampled").scores["exact"]
    assert (counts.num_scored, counts.num_unknown, counts.unknown) == (9, 3, {"no_completion": 3})
    rate = measured.by_name["greedy.exact.success_rate"]
    assert (rate.value, rate.low, rate.high, rate.num_prompts) == (1.0, 0.75, 1.0, 3)


def test_answers_that_are_why_they_have_no_score_are_failures(recipe: Recipe, answers: Answers) -> None:
    changes = {("sampled", 0, 1): Score(None, "exception", is_wrong=True), ("sampled", 0, 2): Score(None, "crashed")}
    measured = EvaluationMetrics(recipe, scored(answers, changes))
    counts = measured.report("sampled").scores["exact"]
    assert (counts.num_scored, counts.wrong) == (7, {"exception": 1})
    assert counts.unknown == {"no_completion": 3, "crashed": 1}
    assert measured.by_name["sampled.exact.success_rate"].value == pytest.approx((0.5 + 1 + 1) / 3)


def test_unknown_scores_count_for_nothing_in_any_metric(recipe: Recipe, answers: Answers) -> None:
    crashed = Score(None, "crashed")
    changes = {("sampled", 1, number): crashed for number in range(3)} | {("greedy", 0, 0): Score(None, "timeout")}
    changes |= {("sampled", 0, number): score for number, score in enumerate((Score(1.0), Score(0.0), crashed))}
    metrics = EvaluationMetrics(recipe, scored(answers, changes)).by_name
    assert metrics["greedy.exact.mean_reward"].value == 1.0
    assert metrics["sampled.exact.mean_reward"].value == pytest.approx((0.5 + 1.0) / 2)


def test_a_task_that_the_recipe_names_twice_counts_once(folder: Path, answers: Answers) -> None:
    scored(answers)
    once, twice = (recipe_for(folder, {"num_samples": 3, "tasks": ["exact"] * num}) for num in (1, 2))
    expected = EvaluationMetrics(once, answers).by_name
    assert expected["sampled.exact.success_rate"].num_prompts == 3
    assert EvaluationMetrics(twice, answers).by_name == expected


def test_metrics_of_a_task_are_given_for_every_value_of_a_key_of_the_data(folder: Path, answers: Answers) -> None:
    recipe = recipe_for(folder, {"num_samples": 3, "by": ["level"]})
    levels = (10, 9, 10, 9)  # numbers in their order: 9 before 10
    data = [p.model_copy(update={"data": {"level": n}}) for p, n in zip(answers.prompts, levels, strict=True)]
    values = {(one.mode, one.prompt, one.number): float(one.number == 0 or one.prompt == 3) for one in answers.answers}
    scored(answers, {key: Score(value) for key, value in values.items()})
    found = EvaluationMetrics(recipe, dataclasses.replace(answers, prompts=data)).by_name
    assert [name for name in found if "[" in name and "success_rate" in name] == [
        f"{mode}.exact.success_rate[level={n}]" for mode in ("greedy", "sampled") for n in (9, 10)
    ]
    easy, hard = (found[f"sampled.exact.success_rate[level={n}]"] for n in (9, 10))
    assert (easy.value, easy.num_prompts, easy.num_completions) == (pytest.approx(2 / 3), 2, 6)
    assert easy.stderr == pytest.approx(1 / 3)
    # the prompt that was refused is unknown in its group too
    assert (hard.value, hard.num_prompts) == (pytest.approx(1 / 3), 1)
    assert (hard.low, hard.high) == (pytest.approx(1 / 6), pytest.approx(2 / 3))
    assert found["sampled.exact.success_rate"].value == pytest.approx((1 / 3 + 1 / 3 + 1) / 3)


def test_a_recipe_none_of_whose_prompts_fit_is_an_error(folder: Path) -> None:
    narrow = {"num_slots": 2, "max_prompt_tokens": 1, "max_response_tokens": 4}
    with pytest.raises(ConfigError, match=r"none of the 4 prompts can be completed: .*max_prompt_tokens"):
        answer(folder, make_recipe(folder, searcher=narrow))


def test_limits_of_a_task_hold_in_evaluations_too(folder: Path) -> None:
    tasks = {"exact": {"min_response_tokens": 8}}
    recipe = make_recipe(folder, searcher={"max_prompt_tokens": 40, "max_response_tokens": 8, "tasks": tasks})
    assert {len(one.tokens) for one in answer(folder, recipe).answers} == {8}


def test_training_prompts_are_answered_with_the_settings_of_training(folder: Path) -> None:
    searcher = {"engine": "embedded", "num_slots": 4, "max_prompt_tokens": 12, "top_k": 1}
    recipe = make_recipe(folder, searcher=searcher, eval={"published": {"greedy": False, "num_samples": 3}})
    for split, most in (("train", 1), ("heldout", 3)):
        asked = [prompts()[0].model_copy(update={"split": split})]
        assert len({one.text for one in answer(folder, recipe, asked).answers}) == most


@torch.inference_mode()
def test_both_perplexities_are_what_their_definitions_say(folder, recipe, answers: Answers, tmp_path: Path) -> None:
    start = make_tiny_model(tmp_path / "start", 6, hidden_size=32)
    measure_likelihoods(recipe, start, answers, on_progress=lambda text: None)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(start).eval()
    sums, lengths, published = [], [], []
    for part in answers.of("sampled"):
        for one in part:
            prompt = answers.prompt_tokens[one.prompt]
            ids = torch.tensor([[*prompt, *one.tokens.tolist()]])
            labels = ids.clone()
            labels[0, : len(prompt)] = -100
            each = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], labels[0, 1:], reduction="none")
            sums.append(float(each.sum()))
            lengths.append(len(one.tokens))
            published.append(math.exp(float(each.mean())))  # the mean counts the tokens of the prompt, as 0
    found = perplexities(answers.of("sampled"), answers)
    assert found["per_token"].value == pytest.approx(math.exp(sum(sums) / sum(lengths)), rel=1e-4)
    by_prompt = np.mean([np.mean(published[at : at + 3]) for at in (0, 3, 6)])
    assert found["published"].value == pytest.approx(by_prompt, rel=1e-4)
    assert (found["per_token"].value or 0) > 2 * (found["published"].value or 0)


def test_a_starting_model_with_another_tokenizer_is_refused(recipe: Recipe, answers: Answers, tmp_path: Path) -> None:
    start = make_tiny_model(tmp_path / "start", 6, hidden_size=32)
    text = (start / "tokenizer.json").read_text().replace('"1":', '"swap":').replace('"2":', '"1":')
    (start / "tokenizer.json").write_text(text.replace('"swap":', '"2":'))
    with pytest.raises(ConfigError, match="another tokenizer"):
        measure_likelihoods(recipe, start, answers, on_progress=lambda text: None)


def test_cosine_distance_is_that_of_all_samples_and_of_the_successes(folder: Path, tmp_path: Path) -> None:
    encoder = make_tiny_encoder(tmp_path / "encoder")
    published = {"num_samples": 4, "success_above": {"exact": 0.5}}
    section = {"num_samples": 2, "embedding_model": str(encoder), "published": published}
    recipe = recipe_for(folder, {}, eval=section)
    answers = answer(folder, recipe)
    values = {0: 0.5, 1: 0.51, 2: 0.9, 3: 0.1}  # strictly above: 1 and 2 of every prompt
    keys = [(one.mode, one.prompt, one.number) for one in answers.answers]
    scored(answers, {key: Score(values[key[2]] if key[0] == "sampled" else 0.0) for key in keys})
    metrics = EvaluationMetrics(recipe, answers).by_name
    whole, good = (metrics[f"sampled.diversity.cosine_distance{name}"] for name in ("", "_of_successes"))
    assert (whole.num_completions, good.num_completions) == (12, 6)
    assert metrics["sampled.exact.success_rate"].value == 0.5
    assert whole.value is not None
    assert 0 < whole.value < 2
    assert good.value != whole.value
