"""Scores of all answers under every task that the recipe names, from the reward service."""

from __future__ import annotations

import asyncio

from tba.api import ScoreItem, ScoreResult
from tba.api.scores import ANSWER_REASONS
from tba.clients import RewardClient
from tba.config import Recipe
from tba.errors import BadRequestError
from tba.tokens import client_token
from tba_searcher.evaluation.answers import Answer, Answers, OnProgress, Score
from tba_searcher.waits import RETRY_S, WaitRegistry, retry_until

REQUEST_ITEMS = 16
"""Answers per request: few, so that slow reward models answer within the deadline."""
REQUESTS_AT_ONCE = 4


def score_all(recipe: Recipe, answers: Answers, *, on_progress: OnProgress) -> None:
    """Request the scores of all answers from the reward service, and store them in `Answer.scores`.

    Raises:
        WaitTimeoutError: the service has not answered for `RETRY_S`.
        ServiceError: the service refused a request, and smaller requests did not help.
    """
    client = RewardClient(
        recipe.reward_url,
        token=client_token(recipe.auth.tokens_file, "searcher"),
        ca_file=recipe.tls.ca_file,
        retry_s=1.0,
        timeout_s=recipe.reward.request_deadline_s + 15.0,
    )
    try:
        asyncio.run(_score_all(recipe, answers, client, on_progress))
    finally:
        client.close()


async def _score_all(recipe: Recipe, answers: Answers, client: RewardClient, on_progress: OnProgress) -> None:
    scored: list[tuple[Answer, str]] = []
    items: list[ScoreItem] = []
    for answer in answers.answers:
        prompt = answers.prompts[answer.prompt]
        for task in answers.tasks_of(answer.prompt, recipe.eval.published):
            scored.append((answer, task))
            items.append(
                ScoreItem(
                    item_id=str(len(items)),  # its position: the same answer is scored under several tasks
                    task=task,
                    prompt=prompt.text,
                    response=answer.text,
                    data=prompt.data,
                    finish_reason=answer.finish_reason,
                    response_tokens=answer.tokens.tolist() if recipe.reward.takes_tokens(task) else None,
                )
            )
    # a few requests at once keep the workers of the service busy; more would only run into their deadlines
    waits, semaphore, results = WaitRegistry(), asyncio.Semaphore(REQUESTS_AT_ONCE), dict[int, ScoreResult]()

    async def ask(part: list[ScoreItem]) -> None:
        try:
            async with semaphore:
                reply = await retry_until(
                    lambda: client.score(part),
                    waits=waits,
                    owner=f"scoring-{part[0].item_id}",
                    service="reward",
                    deadline_s=RETRY_S,
                )
        except BadRequestError:  # it may be too large
            if len(part) == 1:
                raise
            half = len(part) // 2
            await ask(part[:half])
            await ask(part[half:])
            return
        results.update({int(result.item_id): result for result in reply.results})
        on_progress(f"{len(results)} of {len(items)} scores")

    await asyncio.gather(*(ask(items[at : at + REQUEST_ITEMS]) for at in range(0, len(items), REQUEST_ITEMS)))
    working = {items[number].task for number, result in results.items() if result.error is None}
    for number, (answer, task) in enumerate(scored):
        result = results[number]
        reason = None if result.error is None else result.error.reason
        # a scorer that raises for one answer and scores others is not broken
        is_wrong = reason in ANSWER_REASONS or (reason == "exception" and task in working)
        answer.scores[task] = Score(None if reason else result.reward, reason, result.reward_version, is_wrong)
