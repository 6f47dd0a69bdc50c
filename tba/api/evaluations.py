"""Evaluations of published versions on held-out prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tba.config.evaluation import pass_at_of
from tba.fields import Integer, Name, Number, StrictModel, VersionText


class EvalResult(StrictModel):
    """The result of one evaluation lease; None is unknown or not measured (an unknown score is counted, never 0).

    The lists have one entry per completion; every other number is about all completions of the prompt together.
    """

    lease_id: Name
    rewards: list[Number | None]
    num_response_tokens: list[Annotated[Integer, Field(ge=0)]]
    num_wrong: Annotated[Integer, Field(ge=0, le=4096)] | None = None
    """Completions without a score because of their own content (for example too long); they count as failures."""
    num_raised: Annotated[Integer, Field(ge=0, le=4096)] | None = None
    """Completions whose scorer raised an exception; they count as failures if others of the task have a score."""
    distinct_1: Number | None = None
    distinct_2: Number | None = None
    distinct_3: Number | None = None
    """Distinct-n: number of different n-grams of tokens / number of all n-grams, over the samples of the prompt."""
    embedding_distance: Number | None = None
    """Mean cosine distance over pairs of samples."""


class EvalResults(StrictModel):
    """POST /v1/evals/{eval_id}/results."""

    searcher_id: Name
    version: VersionText
    results: list[EvalResult]


class EvalRequest(StrictModel):
    """POST /v1/evals: evaluate an announced version on held-out prompts, with the settings of the recipe's `eval`.

    A repeated request returns the evaluation that exists.
    """

    version: VersionText | None = None
    """An announced version that the store still has; None: the latest one."""
    token: Name | None = None
    """The fencing token, if a trainer asks; None: an operator asks."""
    num_prompts: Integer | None = Field(default=None, ge=1, le=10_000)
    """Number of held-out prompts, from the first one on; None: `eval.num_prompts`."""


class EvalNumbers(StrictModel):
    """The numbers of an evaluation; None if nothing is known. Unknown scores are left out and counted.

    `greedy_accuracy` is about the greedy completions, all others are about the samples at the policy temperature.
    `mean_reward` and `mean_response_tokens` are means over samples, all others are means over prompts.
    """

    accuracy: float | None = None
    greedy_accuracy: float | None = None
    pass_at: dict[int, float | None] = Field(default_factory=dict)
    """k -> mean pass@k over the prompts."""
    mean_reward: float | None = None
    mean_response_tokens: float | None = None
    distinct_1: float | None = None
    distinct_2: float | None = None
    distinct_3: float | None = None
    embedding_distance: float | None = None
    num_unknown: int = 0
    """Number of completions left out. One that has no score because of its own content stays in, as a failure."""

    def metric(self, name: str) -> float | None:
        """Return the value of the metric `name`, which is a possible value of `eval.best_metric`; None: not known."""
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
    """The active lineage neither made this version nor descends from it, so it cannot be the best version."""


class EvalReply(EvalInfo):
    """Reply to POST /v1/evals: the evaluation that was asked for."""

    existed: bool = False
    """Whether the evaluation existed before the request; it is then not repeated."""


class BestVersion(StrictModel):
    """The version with the best `metric` so far (`eval.best_metric`); of several equal ones, the newest.

    The compared evaluations have the same `num_samples`, each on the first `num_prompts` held-out prompts.
    """

    version: VersionText
    metric: str
    value: float
    num_prompts: int
    num_samples: int
