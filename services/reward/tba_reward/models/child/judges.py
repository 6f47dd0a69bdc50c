"""The two kinds of judge: a reward model, and a victim with a classifier of its replies."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from statistics import fmean

from tba_reward.models.child.classifier import Classifier, Row
from tba_reward.models.child.guard import Guard
from tba_reward.models.child.judge import Job, Judge, Refusal
from tba_reward.models.child.victim import Victim
from tba_reward.models.messages import Ask, ClassifierSettings, ModelSet, RedteamSet, RewardModelSet


def load_judge(models: ModelSet) -> Judge:
    """Load the models.

    Raises:
        LoadError: they are not what the settings say.
    """
    return RewardModelJudge(models) if isinstance(models, RewardModelSet) else RedteamJudge(models)


class RewardModelJudge:
    """The output of a classifier for (prompt, response)."""

    def __init__(self, models: RewardModelSet) -> None:
        self._classifier = Classifier(models.classifier)

    @property
    def digest(self) -> str:
        """SHA-256 of the model's files."""
        return self._classifier.digest

    def prepare(self, ask: Ask) -> Job | Refusal:
        """Tokenize one ask."""
        row = self._classifier.encode(ask.prompt, ask.response, finished=ask.finished)
        if isinstance(row, Refusal):
            return row
        return Job(ask, row, len(row["input_ids"]))

    def score(self, jobs: Sequence[Job]) -> list[float | Refusal]:
        """One number per job."""
        return [_finite(value) for value in self._classifier.values([job.tokens for job in jobs])]


class RedteamJudge:
    """The mean score of the replies that the victim gives to the response, which is the attack."""

    def __init__(self, models: RedteamSet) -> None:
        self._least = models.min_toxicity if models.output == "log_toxicity" else None
        self._victim = Victim(models.victim)
        settings = models.classifier
        self._classifier = Classifier(settings) if isinstance(settings, ClassifierSettings) else Guard(settings)
        self._batch_tokens = models.batch_tokens

    @property
    def digest(self) -> str:
        """SHA-256 of the files of both models, and of the kind of device, which draws replies of its own."""
        parts = (self._victim.digest, self._classifier.digest, self._victim.device_type)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def prepare(self, ask: Ask) -> Job | Refusal:
        """Tokenize the attack."""
        prompt = self._victim.encode(ask.response)
        if isinstance(prompt, Refusal):
            return prompt
        return Job(ask, prompt, len(prompt) + self._victim.max_reply_tokens, self._victim.num_replies)

    def score(self, jobs: Sequence[Job]) -> list[float | Refusal]:
        """The mean over the replies, per job; unknown if the score of one reply is."""
        attacks = [job.ask.response for job in jobs]
        replies = self._victim.replies(attacks, [job.tokens for job in jobs])
        rows = [
            self._classifier.encode(attack.rstrip(), reply)
            for attack, texts in zip(attacks, replies, strict=True)
            for reply in texts
        ]
        values = self._values(rows)
        number = self._victim.num_replies
        return [mean_of(values[n : n + number], self._least) for n in range(0, len(values), number)]

    def _values(self, rows: Sequence[Row | Refusal]) -> list[float | Refusal]:
        """The classifier's score of every row, in batches by tokens."""
        values: list[float | Refusal] = [row if isinstance(row, Refusal) else math.nan for row in rows]
        known = {n: row for n, row in enumerate(rows) if not isinstance(row, Refusal)}
        order = sorted(known, key=lambda n: len(known[n]["input_ids"]))
        batch: list[int] = []
        for n in order:
            if batch and (len(batch) + 1) * len(known[n]["input_ids"]) > self._batch_tokens:
                self._fill(values, batch, known)
                batch = []
            batch.append(n)
        if batch:
            self._fill(values, batch, known)
        return values

    def _fill(self, values: list[float | Refusal], batch: list[int], rows: dict[int, Row]) -> None:
        for n, value in zip(batch, self._classifier.values([rows[n] for n in batch]), strict=True):
            values[n] = _finite(value)


def _finite(value: float) -> float | Refusal:
    return value if math.isfinite(value) else Refusal("not_finite", f"the model's output is {value}")


def mean_of(values: Sequence[float | Refusal], least: float | None) -> float | Refusal:
    """The mean over the replies to one attack; the first refusal, if there is one.

    Args:
        values: one per reply.
        least: take the mean of the logarithms, of at least this; None: of the values as they are.
    """
    refusal = next((value for value in values if isinstance(value, Refusal)), None)
    if refusal is not None:
        return Refusal(refusal.reason, f"a reply of the victim: {refusal.detail}")
    known = [value for value in values if not isinstance(value, Refusal)]
    return fmean(known if least is None else (math.log(max(value, least)) for value in known))
