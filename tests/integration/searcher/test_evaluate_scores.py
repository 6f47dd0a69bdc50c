"""The evaluator and a reward service over real HTTP: every answer is scored under every task, or it is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tba_searcher.evaluation import scores
from tba_searcher.evaluation.answers import Answer, Answers, Score
from tba_searcher.evaluation.scores import REQUEST_ITEMS, score_all

from tba.api import Prompt
from tba.config import Recipe, parse_recipe
from tba.errors import BadRequestError, WaitTimeoutError
from tests.support.reward_server import RewardServer
from tests.support.trainer_values import make_recipe

NUM_PROMPTS = 100


@pytest.fixture
def answers() -> Answers:
    prompts = [
        Prompt(prompt_id=f"p-{n}", task="addition", text=f"{n}+0=", data={"answer": str(n)}, split="heldout")
        for n in range(NUM_PROMPTS)
    ]
    found = [
        Answer(mode="greedy", prompt=n, number=0, tokens=np.ones(1, np.int32), finish_reason="length", text=f"<{n}>")
        for n in range(NUM_PROMPTS)
    ]
    return Answers(prompts=prompts, prompt_tokens=[(1,)] * NUM_PROMPTS, answers=found)


def recipe_for(reward: RewardServer, **published: Any) -> Recipe:
    return make_recipe("nowhere", reward={"url": reward.url}, eval={"published": published})


def ask(recipe: Recipe, answers: Answers) -> dict[tuple[int, str], Score]:
    score_all(recipe, answers, on_progress=lambda text: None)
    return {(each.prompt, task): score for each in answers.answers for task, score in each.scores.items()}


def test_every_answer_gets_its_own_score_under_every_task(reward: RewardServer, answers: Answers) -> None:
    reward.score = lambda item: (
        "crashed" if item["response"] == "<7>" else float(item["data"]["answer"]) + (item["task"] == "other") / 2
    )
    found = ask(recipe_for(reward, tasks=["addition", "other"]), answers)
    assert len(found) == 2 * NUM_PROMPTS
    for n in range(NUM_PROMPTS):
        for task, value in (("addition", float(n)), ("other", n + 0.5)):
            known = Score(value, None, reward.version)
            assert found[n, task] == (Score(None, "crashed") if n == 7 else known)
    assert max(map(len, reward.requests)) == REQUEST_ITEMS
    assert reward.asked[0]["finish_reason"] == "length"


def test_an_answer_that_a_scorer_raises_for_is_wrong_where_it_scores_others_of_its_task(reward, answers) -> None:
    reasons = {"<1>": "exception", "<2>": "too_long", "<3>": "timeout"}
    reward.score = lambda item: "exception" if item["task"] == "broken" else reasons.get(item["response"], 1.0)
    found = ask(recipe_for(reward, tasks=["addition", "broken"]), answers)
    assert {key for key, score in found.items() if score.is_wrong} == {(1, "addition"), (2, "addition")}
    assert sum(score.value is None for score in found.values()) == NUM_PROMPTS + 3


def test_a_task_with_a_python_function_gets_the_tokens_of_its_answers(reward: RewardServer, answers: Answers) -> None:
    answers.answers = [replace(answer, tokens=np.array([7, answer.prompt], np.int32)) for answer in answers.answers]
    recipe = recipe_for(reward, tasks=["addition", "mine"])
    tasks = {"mine": {"scorers": [{"kind": "python", "function": "graders:same"}]}}
    document = recipe.model_dump(mode="json")
    document["reward"]["tasks"] = tasks
    ask(parse_recipe(document, where="test"), answers)
    sent = {(item["task"], item["prompt"]): item.get("response_tokens") for item in reward.asked}
    for n in range(NUM_PROMPTS):
        assert sent["mine", f"{n}+0="] == [7, n]
        assert sent["addition", f"{n}+0="] is None


def test_a_busy_service_is_asked_again(reward: RewardServer, answers: Answers) -> None:
    busy = {"type": "urn:tba:problem:busy", "title": "busy", "status": 429, "detail": "later", "retry_after_s": 0.01}
    replies = [busy]
    reward.refusal = lambda items: (429, replies.pop()) if replies else None
    assert len(ask(recipe_for(reward), answers)) == NUM_PROMPTS
    assert not replies


def test_a_request_that_is_too_large_is_halved(reward: RewardServer, answers: Answers) -> None:
    problem = {"type": "urn:tba:problem:too-large", "title": "large", "status": 413, "detail": "over 16 MiB"}
    reward.refusal = lambda items: (413, problem) if len(items) > 3 else None
    assert {score.value for score in ask(recipe_for(reward), answers).values()} == {10.0}


def test_what_cannot_be_asked_is_an_error_and_no_score(reward: RewardServer, answers: Answers, monkeypatch) -> None:
    monkeypatch.setattr(scores, "RETRY_S", 0.5)
    problem = {"type": "urn:tba:problem:bad-request", "title": "bad", "status": 422, "detail": "no such field"}
    reward.refusal = lambda items: (422, problem)
    with pytest.raises(BadRequestError, match="no such field"):
        ask(recipe_for(reward), answers)
    reward.leave()
    with pytest.raises(WaitTimeoutError, match="wait reward-unreachable"):
        ask(recipe_for(reward), answers)
    reward.come_back()
