"""The section about evaluations on held-out prompts, and the metrics that can choose the best version."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from tba.config.base import StrictModel
from tba.config.published import PublishedSection
from tba.numbers import MAX_STEP

BEST_METRICS = ("accuracy", "greedy_accuracy", "mean_reward")
"""What `eval.best_metric` may name, beside `pass@K`; more is better in all of them."""
_PASS_AT = re.compile(r"pass@([1-9][0-9]*)")

MAX_WAIT_S = 1e9
"""30 years."""


def pass_at_of(metric: str) -> int | None:
    """K of `pass@K`; None for any other name."""
    match = _PASS_AT.fullmatch(metric)
    return None if match is None else int(match[1])


class EvalSection(StrictModel):
    """Evaluation on held-out prompts, by searchers with a pinned version, while training goes on."""

    every_steps: int = Field(default=50, ge=1, le=MAX_STEP)
    """Evaluate at every so many optimizer steps (at the published version that is next)."""
    num_prompts: int = Field(default=128, ge=1, le=10_000)
    """Held-out prompts of an evaluation during training; always the same ones."""
    num_prompts_final: int = Field(default=512, ge=1, le=10_000)
    """Held-out prompts of the first and the last evaluation."""
    num_samples: int = Field(default=1, ge=1, le=4096)
    """Samples per prompt at the policy temperature (pass@1 is their mean); greedy is one more."""
    pass_at: list[int] = Field(default_factory=list, max_length=16)
    """Every k whose pass@k is wanted: the chance that one of k samples succeeds, estimated without bias from the
    `num_samples` samples of a prompt."""
    success_reward: float = 1.0
    """A completion succeeds when its reward is at least this."""
    kl_to_reference: bool = False
    """Measure the KL divergence from the starting model: every searcher then holds that model as well."""
    embedding_model: str | None = None
    """Local folder of a Hugging Face encoder: the mean cosine distance between the samples of a prompt is measured
    (mean-pooled, on the CPU of the searcher). None: it is not."""
    best_metric: str = "accuracy"
    """What makes a version the best one: accuracy, greedy_accuracy, mean_reward, or pass@K for a K of `pass_at`. The
    best version is never deleted; versions are compared on the same prompts (docs/trainer.md)."""
    timeout_s: float = Field(default=180.0, gt=0, le=MAX_WAIT_S)
    """Deadline of one evaluation."""
    published: PublishedSection = PublishedSection()
    """What `tba evaluate` measures: the evaluation that the task is published with."""

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
                f"best_metric {self.best_metric!r} is none of {', '.join(BEST_METRICS)} and no pass@K with a K of "
                f"pass_at ({self.pass_at})"
            )
        if self.embedding_model is not None and self.num_samples < 2:
            raise ValueError("embedding_model compares the samples of a prompt: raise num_samples to 2 or more")
        for number in self.published.references if self.embedding_model is None else ():
            if ".cosine_distance" in number.metric:
                raise ValueError(
                    f"published.references: {number.name!r} is about {number.metric!r}, and embedding_model is not "
                    "given; name one or remove the reference"
                )
        return self

    @property
    def num_prompts_compared(self) -> int:
        """How many held-out prompts every evaluation has in common: versions are compared on those."""
        return min(self.num_prompts, self.num_prompts_final)
