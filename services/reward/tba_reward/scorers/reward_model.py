"""Kind `reward_model`: the output of a sequence classification model, or a comparison by it with another response."""

from __future__ import annotations

import asyncio

from tba.config.reward import RewardModelSpec
from tba_reward.scorer import Failure, Item, Outcome, Scorer
from tba_reward.scorers import Tools
from tba_reward.scorers.in_model_server import ModelServerScorer

IMPLEMENTATION = 1
WIN, TIE, LOSS = 1.0, 0.5, 0.0


def build(spec: RewardModelSpec, tools: Tools) -> Scorer:
    """Return a scorer whose model is loaded when it is started."""
    return RewardModelScorer(spec, tools)


class RewardModelScorer(ModelServerScorer):
    """Scores every item in one model process."""

    def __init__(self, spec: RewardModelSpec, tools: Tools) -> None:
        super().__init__(spec, tools, implementation=IMPLEMENTATION)
        self._against, self._missing_eos_penalty = spec.against, spec.missing_eos_penalty

    async def _score(self, item: Item) -> Outcome:
        if self._against is None:
            return await self._own_score(item)
        other = item.data.get(self._against)
        if not isinstance(other, str):
            return Failure("bad_data", f"data needs a text `{self._against}`, got {other!r:.100}")
        # at once, so that both can be in one batch
        own, others = await asyncio.gather(self._own_score(item), self._ask(item.prompt, other, finished=True))
        if isinstance(own, Failure):
            return own
        if isinstance(others, Failure):
            return others
        # equal logits do happen: the same text twice, or a model that saturates
        return TIE if own == others else WIN if own > others else LOSS

    async def _own_score(self, item: Item) -> Outcome:
        # a constant instead of the model's score, as published for TL;DR
        if not item.is_finished and self._missing_eos_penalty is not None:
            return self._missing_eos_penalty
        return await super()._score(item)
