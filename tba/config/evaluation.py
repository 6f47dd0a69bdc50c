"""Settings of evaluations on held-out prompts, during training and by `tba evaluate`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tba.config.schedules import MAX_TEMPERATURE, MIN_TEMPERATURE
from tba.fields import MAX_STEP, StrictModel

Mode = Literal["greedy", "sampled"]
TaskName = Annotated[str, Field(min_length=1, max_length=128)]


class PublishedNumber(StrictModel):
    """A published number that the result of `tba evaluate` is compared with."""

    name: str = Field(min_length=1, max_length=80)
    """Name for people: the method, and anything else that tells this number from other ones."""
    metric: str
    """Name of the metric in evaluation.json: MODE.TASK.mean_reward, MODE.TASK.success_rate, MODE.perplexity.per_token
    and so on; MODE is greedy or sampled. A metric that is not measured is shown as unknown."""
    value: float
    """The number."""
    setting: str = Field(min_length=1, max_length=200)
    """The conditions of the measurement, above all where they differ from this recipe: model, steps, lag, searchers."""
    source: str = Field(min_length=1, max_length=200)
    """Where it was published."""


class PublishedSection(StrictModel):
    """`tba evaluate`: evaluate one model on held-out prompts; every number has a standard error (docs/recipes.md)."""

    num_prompts: int | None = Field(default=None, ge=1)
    """Number of held-out prompts, from the first one on; none: all of them."""
    greedy: bool = True
    """Generate one greedy completion of every prompt."""
    num_samples: int = Field(default=0, ge=0, le=100_000)
    """Samples of every prompt, in addition to the greedy completion; 0: none."""
    temperature: float | None = Field(default=None, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Temperature of the samples; none: the policy temperature."""
    tasks: list[TaskName] = Field(default_factory=list, max_length=16)
    """Every completion is scored under each of these tasks. Empty: under the task of its prompt."""
    success_above: dict[TaskName, float] = Field(default_factory=dict)
    """Task -> threshold: a completion succeeds when its score is strictly above it. In other tasks, it succeeds when
    its score is at least `eval.success_reward`."""
    by: list[str] = Field(default_factory=list, max_length=16)
    """Keys of the prompts' data, such as "level". The metrics are also reported for the prompts of each value of such a
    key, as success_rate[level=3]. Every held-out prompt needs these keys, with a text or a number."""
    perplexity: bool = False
    """Measure the perplexity of the completions under the starting model: per completion token; and per token of prompt
    and completion together, as published for TL;DR."""
    references: list[PublishedNumber] = Field(default_factory=list)
    """Published numbers to compare the result with."""

    @model_validator(mode="after")
    def _check(self) -> PublishedSection:
        if not self.greedy and not self.num_samples:
            raise ValueError("greedy is false and num_samples is 0: nothing would be generated; change one of them")
        return self


BEST_METRICS = ("accuracy", "greedy_accuracy", "mean_reward")
"""Values of `eval.best_metric` other than `pass@K`. A higher value is better in all of them."""
_PASS_AT = re.compile(r"pass@([1-9][0-9]*)")

MAX_WAIT_S = 1e9
"""30 years."""


def pass_at_of(metric: str) -> int | None:
    """Return the K of the metric name `pass@K`; None for any other name."""
    match = _PASS_AT.fullmatch(metric)
    return None if match is None else int(match[1])


class EvalSection(StrictModel):
    """Evaluation on held-out prompts during training; searchers generate with the weights of one fixed version."""

    every_steps: int = Field(default=50, ge=1, le=MAX_STEP)
    """Optimizer steps between evaluations; each evaluates the next published version."""
    num_prompts: int = Field(default=128, ge=1, le=10_000)
    """Number of held-out prompts of an evaluation during training; they are always the same ones."""
    num_prompts_final: int = Field(default=512, ge=1, le=10_000)
    """Number of held-out prompts of the first and the last evaluation."""
    num_samples: int = Field(default=1, ge=1, le=4096)
    """Samples per prompt at the policy temperature (pass@1 is their mean), in addition to one greedy completion."""
    pass_at: list[int] = Field(default_factory=list, max_length=16)
    """Measure pass@k for each of these k: the probability that at least one of k samples succeeds. It is estimated
    without bias from the `num_samples` samples of a prompt."""
    success_reward: float = 1.0
    """A completion succeeds when its reward is at least this."""
    embedding_model: str | None = None
    """Local folder of a Hugging Face encoder, to measure the mean cosine distance between the samples of a prompt.
    Embeddings are mean-pooled, on the CPU of the searcher. None: the distance is not measured."""
    best_metric: str = "accuracy"
    """Metric that decides which version is the best: accuracy, greedy_accuracy, mean_reward, or pass@K with a K of
    `pass_at`. Versions are compared on the same prompts. The best version is never deleted (docs/trainer.md)."""
    timeout_s: float = Field(default=180.0, gt=0, le=MAX_WAIT_S)
    """Deadline of one evaluation."""
    published: PublishedSection = PublishedSection()
    """Settings of `tba evaluate`, which measures the model as it was published for the task."""

    @model_validator(mode="after")
    def _check(self) -> EvalSection:
        impossible = [k for k in self.pass_at if not 1 <= k <= self.num_samples]
        if impossible:
            raise ValueError(
                f"pass_at holds {impossible[0]}, and there are {self.num_samples} samples per prompt (num_samples): "
                f"choose from 1 to {self.num_samples}, or raise num_samples"
            )
        if self.best_metric not in BEST_METRICS and pass_at_of(self.best_metric) not in self.pass_at:
            raise ValueError(
                f"best_metric {self.best_metric!r} is neither one of {', '.join(BEST_METRICS)} nor a pass@K with a K "
                f"of pass_at ({self.pass_at})"
            )
        if self.embedding_model is not None and self.num_samples < 2:
            raise ValueError("embedding_model compares the samples of a prompt: raise num_samples to 2 or more")
        return self

    def succeeds(self, task: str, reward: float) -> bool:
        """Return whether a completion with this reward counts as a success in `tba evaluate`."""
        above = self.published.success_above.get(task)
        return reward > above if above is not None else reward >= self.success_reward

    def success_rule(self, task: str) -> str:
        """Return the rule of `succeeds` in words."""
        above = self.published.success_above.get(task)
        return f"> {above:g}" if above is not None else f">= {self.success_reward:g}"

    @property
    def num_prompts_compared(self) -> int:
        """Number of held-out prompts that all evaluations have in common; versions are compared on these."""
        return min(self.num_prompts, self.num_prompts_final)
