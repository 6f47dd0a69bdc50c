"""The section about the published evaluation of a task: what `tba evaluate` generates, scores and compares."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tba.config.base import StrictModel
from tba.config.bounded import MAX_TEMPERATURE, MIN_TEMPERATURE

Mode = Literal["greedy", "sampled"]
TASK_METRICS = ("mean_reward", "success_rate")
OTHER_METRICS = (
    "mean_response_tokens",
    "finished_share",
    "perplexity.per_token",
    "perplexity.published",
    "diversity.cosine_distance",
    "diversity.cosine_distance_of_successes",
    "diversity.distinct_1",
    "diversity.distinct_2",
    "diversity.distinct_3",
)
_PASS_AT = re.compile(r"pass@[1-9][0-9]*")
TaskName = Annotated[str, Field(min_length=1, max_length=128)]


class PublishedNumber(StrictModel):
    """A number that somebody published, to compare with."""

    name: str = Field(min_length=1, max_length=80)
    """Whose number: a method, and what else tells it from the others."""
    metric: str
    """What it is a number of: MODE.TASK.mean_reward, MODE.TASK.success_rate, sampled.TASK.pass@K, or MODE.perplexity.
    per_token and the like, as evaluation.json names them; MODE is greedy or sampled."""
    value: float
    """The number."""
    setting: str = Field(min_length=1, max_length=200)
    """What it was measured with, above all where that differs from this recipe: model, steps, lag, searchers."""
    source: str = Field(min_length=1, max_length=200)
    """Where it stands."""


class PublishedSection(StrictModel):
    """`tba evaluate`: held-out prompts, one model, every number with its standard error (docs/evaluation.md)."""

    num_prompts: int | None = Field(default=None, ge=1)
    """The first so many held-out prompts; none: all of them."""
    greedy: bool = True
    """One greedy completion of every prompt."""
    num_samples: int = Field(default=0, ge=0, le=100_000)
    """So many samples of every prompt besides; 0: none."""
    temperature: float | None = Field(default=None, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Temperature of the samples; none: the policy temperature."""
    pass_at: list[int] = Field(default_factory=list, max_length=16)
    """Every k whose pass@k is wanted, from the samples."""
    tasks: list[TaskName] = Field(default_factory=list, max_length=16)
    """Every completion is scored under each of these tasks. Empty: under the task of its prompt."""
    success_above: dict[TaskName, float] = Field(default_factory=dict)
    """Task -> a completion succeeds when its score is strictly above this. Other tasks: when it is at least
    `eval.success_reward`."""
    perplexity: bool = False
    """Perplexity of the completions under the starting model, per completion token and as the TL;DR task publishes
    it: divided by the length of prompt and completion."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the samples."""
    silence_s: float = Field(default=600.0, gt=0)
    """The evaluator, which says how far it is, is killed when it has said nothing for this long; loading a large model
    is the longest silence."""
    references: list[PublishedNumber] = Field(default_factory=list)
    """Published numbers that the result is compared with."""

    @model_validator(mode="after")
    def _check(self) -> PublishedSection:
        if not self.greedy and not self.num_samples:
            raise ValueError("greedy is false and num_samples is 0: nothing would be generated; change one of them")
        impossible = [k for k in self.pass_at if not 1 <= k <= self.num_samples]
        if impossible:
            raise ValueError(
                f"pass_at holds {impossible[0]}, and there are {self.num_samples} samples per prompt (num_samples): "
                f"choose from 1 to {self.num_samples}, or raise num_samples"
            )
        for number in self.references:
            self._check_metric(number)
        return self

    def _check_metric(self, number: PublishedNumber) -> None:
        """A number that could never be compared is a mistake."""
        mode, _, rest = number.metric.partition(".")
        task, _, what = rest.rpartition(".")
        of_task = task and (what in TASK_METRICS or (mode == "sampled" and _PASS_AT.fullmatch(what)))
        if mode not in ("greedy", "sampled") or not (rest in OTHER_METRICS or of_task):
            raise ValueError(
                f"references: {number.name!r} is about {number.metric!r}, which is none of MODE.TASK.{{"
                f"{', '.join((*TASK_METRICS, 'pass@K'))}}} and MODE.{{{', '.join(OTHER_METRICS)}}}, where MODE is "
                "greedy or sampled"
            )
        missing = {
            "greedy is false": mode == "greedy" and not self.greedy,
            "num_samples is 0": mode == "sampled" and not self.num_samples,
            "diversity is that of several samples": rest.startswith("diversity.")
            and (mode == "greedy" or self.num_samples < 2),
            "perplexity is false": rest.startswith("perplexity.") and not self.perplexity,
            f"tasks is {self.tasks}": bool(of_task) and bool(self.tasks) and task not in self.tasks,
            f"pass_at is {self.pass_at}": what.startswith("pass@") and int(what[5:] or 0) not in self.pass_at,
        }
        for reason, is_so in missing.items():
            if is_so:
                raise ValueError(
                    f"references: {number.name!r} is about {number.metric!r}, which is not measured: {reason}; change "
                    "that or remove the reference"
                )
