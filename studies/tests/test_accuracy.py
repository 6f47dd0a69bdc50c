"""studies/accuracy.py: exact and sampled accuracy of a model, of tasks that can be measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tba_searcher.engines.tokenizer import TextCodec

from examples.worlds.chain.prepare import lesson
from examples.worlds.starter import Lesson
from examples.worlds.tally.prepare import LESSON as TALLY
from studies.accuracy import judge_of, rule_of
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.generators.addition import CHARACTERS
from tba_cli.prompts.reader import heldout_prompts
from tba_cli.starter_models import starting_model as quickstart

ROOT = Path(__file__).parents[2]


def recipe_of(name: str, *sets: str) -> Recipe:
    folder = "recipes" if name == "quickstart" else f"examples/worlds/{name}"
    return load_recipe(ROOT / folder / f"{name}.toml", environ={}, sets=sets)


def make_model(folder: Path, lesson: Lesson | None = None) -> Any:
    torch.manual_seed(0)
    shape, characters, max_length = quickstart.SHAPE, CHARACTERS, quickstart.MAX_LENGTH_TOKENS
    if lesson is not None:
        shape, characters, max_length = lesson.shape, lesson.characters, lesson.max_length_tokens
    tokenizer = quickstart.build_tokenizer(characters, max_length)
    model: Any = quickstart.build_model(tokenizer, shape)
    model.eval()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return model


def test_expected_accuracy_is_the_probability_of_the_answers_at_the_policy_temperature(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    recipe = recipe_of("quickstart", "model.policy_temperature=0.5", "searcher.sampling_temperature=0.5")
    codec, total = TextCodec(tmp_path), 0.0
    for prompt in heldout_prompts(recipe)[:7]:
        tokens, probability = list(codec.encode_prompt(prompt.text)), 1.0
        for token in codec.encode_response(prompt.data["answer"]):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
            probability *= float((logits / 0.5).softmax(0)[token])
            tokens.append(token)
        total += probability
    found = judge_of(recipe, tmp_path, 7).measure(dict(model.named_parameters()))
    assert found.pass_at_1 == pytest.approx(total / 7, rel=1e-4)
    assert 0 <= found.greedy <= 1


def test_the_answer_of_a_chain_is_its_last_number_in_a_sampled_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recipe = make_model(tmp_path, lesson("0.3m")), recipe_of("chain")
    assert (rule_of(recipe).kind, rule_of(recipe_of("quickstart")).kind) == ("last_number", "exact")
    judge, prompts = judge_of(recipe, tmp_path, 8), heldout_prompts(recipe)[:8]
    assert judge.measure(dict(model.named_parameters())).pass_at_1 < 0.5  # it has learned nothing
    answers = {prompt.text: prompt.data["answer"] for prompt in prompts}
    codec = TextCodec(tmp_path)
    texts = {codec.encode_prompt(text): text for text in answers}

    def whole_chains(prompts: list[tuple[int, ...]], is_greedy: bool) -> list[list[int]]:
        rows = [texts[ids] for ids in prompts]
        # a greedy response ends in the answer behind a way, a sampled one goes on to something else
        return [list(codec.encode_response(f"1={answers[row]}{'' if is_greedy else '=7777'}")) for row in rows]

    monkeypatch.setattr(judge, "_generate", whole_chains)
    found = judge.measure(dict(model.named_parameters()))
    assert (found.pass_at_1, found.greedy) == (0.0, 1.0)


def test_responses_to_prompts_of_different_lengths_are_those_of_each_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path, TALLY)
    with torch.no_grad():
        for parameter in model.parameters():  # so that it does not say one token for ever
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    judge, prompts = judge_of(recipe_of("tally"), tmp_path, 6), heldout_prompts(recipe_of("tally"))[:6]
    ids = [TextCodec(tmp_path).encode_prompt(prompt.text) for prompt in prompts]
    assert len({len(each) for each in ids}) > 1
    with torch.no_grad():
        endless = judge._generate(ids, is_greedy=True)
        assert len({tuple(response) for response in endless}) == len(ids)
        judge._tokenizer.eos_token_id = endless[0][5]  # rows that have ended leave the batch
        together = judge._generate(ids, is_greedy=True)
        assert len({len(response) for response in together}) > 1
        assert together == [judge._generate([each], is_greedy=True)[0] for each in ids]


def test_a_task_with_another_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be measured"):
        rule_of(recipe_of("chain", 'reward.tasks.chain.scorers=[{kind="math"}]'))
