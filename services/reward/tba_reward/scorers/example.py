"""Whether a scorer works here: it scores an item whose score is known."""

from __future__ import annotations

from tba_reward.scorers.base import Example, Failure, Scorer

OK = "ok"


async def try_example(scorer: Scorer, example: Example) -> str:
    """Score the example: `ok`, or what came out instead."""
    outcome = (await scorer.score([example.item]))[0]
    if isinstance(outcome, Failure):
        return f"its example failed ({outcome.reason}: {outcome.detail})"
    if outcome != example.score:
        return f"its example scored {outcome}, not {example.score}"
    return OK
