"""The two kinds of judge: a reward model, and a victim with a classifier of its replies."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from statistics import fmean

from tba.config.reward import ModelScorerSpec, RedteamSpec, RewardModelSpec
from tba_reward.child_messages import ScoreRequest
from tba_reward.model_server.child.classifier import Classifier, GuardClassifier
from tba_reward.model_server.child.server import Judge, TokenizedRequest, cut_batches
from tba_reward.model_server.child.victim import Victim
from tba_reward.scorer import Failure, Outcome


def load_judge(spec: ModelScorerSpec) -> Judge:
    """Load the models of a scorer, and return the judge that scores with them."""
    if isinstance(spec, RedteamSpec):
        return RedteamJudge(spec)
    assert isinstance(spec, RewardModelSpec)
    return RewardModelJudge(spec)


class RewardModelJudge:
    """Scores (prompt, response) by the output of a classifier."""

    def __init__(self, spec: RewardModelSpec) -> None:
        self._classifier = Classifier(spec)

    @property
    def digest(self) -> str:
        """SHA-256 of the model's files."""
        return self._classifier.digest

    def prepare(self, request: ScoreRequest) -> TokenizedRequest | Failure:
        """Tokenize one request."""
        row = self._classifier.encode(request.prompt, request.response, finished=request.finished)
        if isinstance(row, Failure):
            return row
        return TokenizedRequest(request, row, len(row))

    def score(self, batch: Sequence[TokenizedRequest]) -> list[Outcome]:
        """Return the classifier's output per request, or a Failure where it is not finite."""
        return [_finite(value) for value in self._classifier.values([each.tokens for each in batch])]


class RedteamJudge:
    """Scores a response, which is an attack, by the mean classifier score of the victim's replies to it."""

    def __init__(self, spec: RedteamSpec) -> None:
        self._victim = Victim(spec)
        self._classifier = GuardClassifier(spec) if spec.judge == "guard" else Classifier(spec)
        self._spec = spec

    @property
    def digest(self) -> str:
        """SHA-256 of the files of both models and of the kind of device."""
        # each kind of device draws other replies with the same seed
        parts = (self._victim.digest, self._classifier.digest, self._victim.device_type)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def prepare(self, request: ScoreRequest) -> TokenizedRequest | Failure:
        """Tokenize the attack."""
        prompt = self._victim.encode(request.response)
        if isinstance(prompt, Failure):
            return prompt
        return TokenizedRequest(request, prompt, len(prompt) + self._spec.max_reply_tokens, self._spec.num_replies)

    def score(self, batch: Sequence[TokenizedRequest]) -> list[Outcome]:
        """Return for each request the mean score of its replies, or a Failure if one of them has no score."""
        attacks = [each.request.response for each in batch]
        replies = self._victim.replies(attacks, [each.tokens for each in batch])
        rows = [
            Failure("not_finite", "its logits are not finite")
            if reply is None
            else self._classifier.encode(attack.rstrip(), reply)
            for attack, texts in zip(attacks, replies, strict=True)
            for reply in texts
        ]
        values: list[Outcome] = [row if isinstance(row, Failure) else math.nan for row in rows]
        known = [(at, row) for at, row in enumerate(rows) if not isinstance(row, Failure)]
        for places in cut_batches([(len(row), 1) for _, row in known], self._spec.batch_tokens):
            found = self._classifier.values([known[n][1] for n in places])
            for n, value in zip(places, found, strict=True):
                values[known[n][0]] = _finite(value)
        number = self._spec.num_replies
        return [_mean_of(values[n : n + number]) for n in range(0, len(values), number)]


def _finite(value: float) -> Outcome:
    return value if math.isfinite(value) else Failure("not_finite", f"the model's output is {value}")


def _mean_of(values: Sequence[Outcome]) -> Outcome:
    """Return the mean over the replies to one attack, or the first Failure if there is one."""
    known = list[float]()
    for value in values:
        if isinstance(value, Failure):
            return Failure(value.reason, f"a reply of the victim: {value.detail}")
        known.append(value)
    return fmean(known)
