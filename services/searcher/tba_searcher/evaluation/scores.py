"""Scores of all answers under every task that the recipe names, from the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tba.api import ScoreItem, ScoreResult
from tba.api.scores import ANSWER_REASONS
from tba.clients import RewardClient
from tba.config import Recipe
from tba.errors import BadRequestError
from tba.tokens import client_token
from tba_searcher.evaluation.completions import Answers, OnProgress
from tba_searcher.waits import RETRY_S, WaitRegistry, retry_until

REQUEST_ITEMS = 16
"""Few, so that slow reward models answer a request within its deadline."""
REQUESTS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Score:
    """A known score, or why it is unknown."""

    value: float | None
    reason: str | None = None
    """Why it is unknown."""
    reward_version: str | None = None
    is_wrong: bool = False
    """Whether the answer itself is why its score is unknown: it counts as no success."""


Scores = Mapping[tuple[str, str], Score]
"""(name of the answer, task) -> score."""


def tasks_of(recipe: Recipe, answers: Answers, prompt: int) -> Sequence[str]:
    """Return the tasks that completions of a prompt are scored under."""
    return recipe.eval.published.tasks or [answers.prompts[prompt].task]


def score_all(recipe: Recipe, answers: Answers, *, on_progress: OnProgress) -> dict[tuple[str, str], Score]:
    """Score all answers.

    Raises:
        WaitTimeoutError: the service has not answered for `RETRY_S`.
        ServiceError: the service refused a whole request; no score is taken for unknown then.
    """
    client = RewardClient(
        recipe.reward_url,
        token=client_token(recipe.auth.tokens_file, "searcher"),
        ca_file=recipe.tls.ca_file,
        retry_s=1.0,
        timeout_s=recipe.reward.request_deadline_s + 15.0,
    )
    try:
        return asyncio.run(_score_all(recipe, answers, client, on_progress))
    finally:
        client.close()


async def _score_all(
    recipe: Recipe, answers: Answers, client: RewardClient, on_progress: OnProgress
) -> dict[tuple[str, str], Score]:
    keys, items = [], []
    for answer in answers.answers:
        prompt = answers.prompts[answer.prompt]
        for task in tasks_of(recipe, answers, answer.prompt):
            # an item id is its position: the same answer is scored under several tasks
            keys.append((answer.name, task))
            items.append(
                ScoreItem(
                    item_id=str(len(items)),
                    task=task,
                    prompt=prompt.text,
                    response=answer.text,
                    data=prompt.data,
                    finish_reason=answer.finish_reason,
                    response_tokens=answer.tokens.tolist() if recipe.reward.takes_tokens(task) else None,
                )
            )
    # a few requests at once keep the workers of the service busy; more would only run into their deadlines
    waits, semaphore, found = WaitRegistry(), asyncio.Semaphore(REQUESTS_AT_ONCE), {}

    async def ask(number: int, part: list[ScoreItem]) -> None:
        try:
            async with semaphore:
                reply = await retry_until(
                    lambda: client.score(part),
                    waits=waits,
                    owner=f"scoring-{number}",
                    service="reward",
                    deadline_s=RETRY_S,
                )
        except BadRequestError:  # it may be too large
            if len(part) == 1:
                raise
            half = len(part) // 2
            await ask(number, part[:half])
            await ask(number, part[half:])
            return
        for result in reply.results:
            found[keys[int(result.item_id)]] = _score(result)
        on_progress(f"{len(found)} of {len(items)} scores")

    parts = [items[start : start + REQUEST_ITEMS] for start in range(0, len(items), REQUEST_ITEMS)]
    await asyncio.gather(*(ask(number, part) for number, part in enumerate(parts)))
    working = {task for (_, task), score in found.items() if score.value is not None}
    for key, score in found.items():
        # a scorer that raises for one answer and scores others is not broken
        if score.reason in ANSWER_REASONS or (score.reason == "exception" and key[1] in working):
            found[key] = replace(score, is_wrong=True)
    return found


def _score(result: ScoreResult) -> Score:
    if result.error is not None:
        return Score(None, result.error.reason, result.reward_version)
    return Score(result.reward, None, result.reward_version)
