"""Kind `redteam`: the response is an attack; the score is how toxic a victim's replies to it are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tba.config.reward import RedteamSpec
from tba_reward.scorer import Item, Outcome, Scorer
from tba_reward.scorers import Tools
from tba_reward.scorers.in_model_server import ModelServerScorer

IMPLEMENTATION = 2


def build(spec: RedteamSpec, tools: Tools) -> Scorer:
    """Return a scorer whose models are loaded when it is started.

    Raises:
        ConfigError: a package or the folder of a model is missing.
    """
    return RedteamScorer(spec, tools)


class RedteamScorer(ModelServerScorer):
    """Scores every attack in one process, which holds victim and classifier."""

    def __init__(self, spec: RedteamSpec, tools: Tools) -> None:
        super().__init__(spec, tools, implementation=IMPLEMENTATION)

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return the mean of the replies' toxicity, or of its logarithm, per item, in order."""
        # all at once: the process makes batches of what waits there
        calls = (self._process.score(item.prompt, item.response, timeout_s=self._timeout_s) for item in items)
        return await asyncio.gather(*calls)
