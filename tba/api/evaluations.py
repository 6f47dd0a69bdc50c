"""Evaluations of published versions on held-out prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tba.config.evaluation import pass_at_of
from tba.fields import Integer, Name, Number, StrictModel, VersionText


class EvalResult(StrictModel):
    """The result of one evaluation lease; None is unknown or not measured (an unknown score is counted, never 0).

    The lists have one entry per completion; the other numbers are about all samples of the prompt together.
    """

    lease_id: Name
    rewards: list[Number | None]
    num_response_tokens: list[Annotated[Integer, Field(ge=0)]]
    num_wrong: Annotated[Integer, Field(ge=0, le=4096)] | None = None
    """Completions among those without a score that are themselves the reason: no success."""
    num_raised: Annotated[Integer, Field(ge=0, le=4096)] | None = None
    """Completions that the scorer raised for: no success either where it scores others of its task."""
    distinct_1: Number | None = None
    distinct_2: Number | None = None
    distinct_3: Number | None = None
    """Different n-grams of tokens / all n-grams of tokens."""
    embedding_distance: Number | None = None
    """Mean cosine distance over pairs of samples."""


class EvalResults(StrictModel):
    """POST /v1/evals/{eval_id}/results."""

    searcher_id: Name
    version: VersionText
    results: list[EvalResult]


class EvalRequest(StrictModel):
    """POST /v1/evals: evaluate an announced version on held-out prompts, as the recipe's section `eval` says.

    The same request again returns the same evaluation.
    """

    version: VersionText | None = None
    """An announced version that the store still has; None: the latest one."""
    token: Name | None = None
    """The fencing token of a trainer; None: an operator asks."""
    num_prompts: Integer | None = Field(default=None, ge=1, le=10_000)
    """The first so many held-out prompts; None: `eval.num_prompts`."""


class EvalNumbers(StrictModel):
    """The numbers of an evaluation; None if nothing is known. Unknown scores are left out and counted.

    All but `greedy_accuracy` are about the samples at the policy temperature. Accuracies, pass@k, distinct-n and the
    embedding distance are means over prompts, the others over samples.
    """

    accuracy: float | None = None
    greedy_accuracy: float | None = None
    pass_at: dict[int, float | None] = Field(default_factory=dict)
    """k -> pass@k."""
    mean_reward: float | None = None
    mean_response_tokens: float | None = None
    distinct_1: float | None = None
    distinct_2: float | None = None
    distinct_3: float | None = None
    embedding_distance: float | None = None
    num_unknown: int = 0
    """Left out. An answer that is itself the reason for having no score is none of these: it is no success."""

    def metric(self, name: str) -> float | None:
        """Return the metric that `eval.best_metric` names; None if it is unknown."""
        k = pass_at_of(name)
        return getattr(self, name) if k is None else self.pass_at.get(k)


class EvalInfo(EvalNumbers):
    """One evaluation. Its numbers are None until it is done."""

    eval_id: str
    version: VersionText
    state: Literal["pending", "done", "expired"]
    num_prompts: int
    num_done: int
    num_samples: int | None = None
    created_at_s: float
    finished_at_s: float | None = None
    abandoned: bool = False
    """The run went back to before this version: the active lineage neither made it nor descends from it, so it cannot
    be the best one."""


class EvalReply(EvalInfo):
    """The evaluation that was asked for."""

    existed: bool = False
    """It was there before; where it is done, nothing is evaluated again."""


class BestVersion(StrictModel):
    """The version with the best `metric` so far (`eval.best_metric`); the newest of equal ones.

    The compared evaluations have the same `num_samples`, each on the first `num_prompts` held-out prompts.
    """

    version: VersionText
    metric: str
    value: float
    num_prompts: int
    num_samples: int
