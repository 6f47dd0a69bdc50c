"""From a request to the reward service to one score per item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from tba_buffer.scoring.rollout_scorer import Score, request_scores

from tba.api import ScoreError, ScoreItem, ScoreReply, ScoreResult
from tba.clients import RewardClient
from tba.errors import BadRequestError, UnavailableError
from tests.support.buffer import make_rollout


class Client:
    """Scores an item with its number; refuses requests with more than `most` items, and those with `poison`."""

    def __init__(self, *, most: int = 100, poison: str = "") -> None:
        self.most, self.poison = most, poison
        self.sizes: list[int] = []

    def score(self, items: Sequence[ScoreItem]) -> ScoreReply:
        self.sizes.append(len(items))
        if len(items) > self.most or any(item.item_id == self.poison for item in items):
            raise BadRequestError("too large")
        return ScoreReply(results=[self._result(item) for item in items])

    @staticmethod
    def _result(item: ScoreItem) -> ScoreResult:
        if item.response:
            error = ScoreError.model_validate({"reason": item.response, "detail": "why"})
            return ScoreResult(item_id=item.item_id, error=error)
        return ScoreResult(item_id=item.item_id, reward=float(item.item_id), reward_version="v")


def scores(client: Client, responses: Sequence[str]) -> list[Score]:
    items = [ScoreItem(item_id=str(n), task="t", prompt="p", response=text) for n, text in enumerate(responses)]
    return request_scores(cast(RewardClient, client), items)


def test_rewards_and_errors_stay_in_order() -> None:
    assert scores(Client(), ["", "bad_data", "timeout", ""]) == [
        Score(reward=0.0, version="v"),
        Score(reason="bad_data: why"),
        Score(reason="timeout: why", is_transient=True),
        Score(reward=3.0, version="v"),
    ]


def test_a_request_that_is_refused_is_sent_in_halves() -> None:
    client = Client(most=2)
    assert [score.reward for score in scores(client, [""] * 5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert client.sizes == [5, 2, 3, 1, 2]


def test_an_item_that_is_refused_alone_takes_no_other_with_it() -> None:
    found = scores(Client(poison="3"), [""] * 6)
    assert [score.reward for score in found] == [0.0, 1.0, 2.0, None, 4.0, 5.0]
    assert found[3] == Score(reason="refused: too large")


def test_a_service_that_is_away_is_no_score() -> None:
    class Away(Client):
        def score(self, items: Sequence[ScoreItem]) -> ScoreReply:
            raise UnavailableError("gone")

    with pytest.raises(UnavailableError):
        scores(Away(), [""])


def test_a_failed_rollout_has_no_reward_and_remembers_which_version_scored_it_last() -> None:
    failed = make_rollout(reward=1.0, reward_version="v1").with_failure("timeout: 5 s")
    assert (failed.reward, failed.reward_status, failed.reward_reason) == (None, "failed", "timeout: 5 s")
    assert failed.reward_version == "v1"
    assert make_rollout(reward=None).with_failure("x").reward_version is None
    again = failed.with_reward(2.0, "v2")
    assert (again.reward, again.reward_status, again.reward_reason, again.reward_version) == (2.0, "scored", None, "v2")
