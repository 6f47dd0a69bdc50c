"""Kind `reward_model`: the output of a sequence classification model, or whether it beats that of another response."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tba.config.reward import RewardModelSpec
from tba_reward.scorer import Failure, Item, Outcome, Scorer
from tba_reward.scorers import Tools
from tba_reward.scorers.in_model_server import ModelServerScorer

IMPLEMENTATION = 1
WIN, TIE, LOSS = 1.0, 0.5, 0.0


def build(spec: RewardModelSpec, tools: Tools) -> Scorer:
    """Return a scorer with a model process for the model, which `start` loads."""
    return RewardModelScorer(spec, tools, implementation=IMPLEMENTATION)


class RewardModelScorer(ModelServerScorer):
    """Scores an item by the model's output; with `against`, by a win (1), tie (0.5) or loss (0) to another response."""

    async def _score(self, item: Item) -> Outcome:
        assert isinstance(self._spec, RewardModelSpec)
        if self._spec.against is None:
            return await self._own_score(item)
        other = item.data.get(self._spec.against)
        if not isinstance(other, str):
            return Failure("bad_data", f"data needs a text `{self._spec.against}`, got {other!r:.100}")
        # at once, so that both can be in one batch
        its = replace(item, response=other, finish_reason="stop")
        own, others = await asyncio.gather(self._own_score(item), super()._score(its))
        if isinstance(own, Failure):
            return own
        if isinstance(others, Failure):
            return others
        # equal logits do happen: the same text twice, or a model that saturates
        return TIE if own == others else WIN if own > others else LOSS

    async def _own_score(self, item: Item) -> Outcome:
        # a constant instead of the model's score, as published for TL;DR
        assert isinstance(self._spec, RewardModelSpec)
        if not item.is_finished and self._spec.missing_eos_penalty is not None:
            return self._spec.missing_eos_penalty
        return await super()._score(item)
