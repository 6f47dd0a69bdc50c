"""The job that `tba evaluate` gives to the evaluator process, and the report that it returns, evaluation.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tba.api import Prompt, VersionText
from tba.config.evaluation import Mode, PublishedNumber
from tba.errors import ConfigError
from tba.fields import StrictModel

PROGRESS = "progress: "
"""Prefix of the evaluator's output lines that are shown to the person who waits."""


class EvaluationJob(StrictModel):
    """One model to evaluate. Paths are absolute."""

    subject: str
    """The evaluated model in words: `version 1-40 of run gsm8k`, `model folder ...`."""
    model: Path
    """Folder of the model in Hugging Face format."""
    version: VersionText | None = None
    """The weight version in `model`; none: the model is not a version of a run."""
    manifest: Path | None = None
    """File with the manifest of that version, with which the engine checks its weights."""
    start: Path | None = None
    """Folder of the starting model; needed to measure perplexity."""
    prompts: list[Prompt]
    """The prompts, in order: all held out; or all for training, and answered with the settings of training."""
    out: Path
    """Folder for completions.jsonl and evaluation.json."""


def load_job(path: Path) -> EvaluationJob:
    """Read a job from its file; raise ConfigError if that is not possible."""
    try:
        return EvaluationJob.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"evaluation job {path} cannot be read ({first_line}); `tba evaluate` writes it") from None


class Estimate(StrictModel):
    """A mean over prompts (or a function of means) with its standard error; None is unknown.

    The standard error treats prompts as independent, but not completions of one prompt. With a single prompt, its
    completions are treated as independent.
    """

    value: float | None
    stderr: float | None
    num_prompts: int
    """Number of prompts with at least one known value."""
    num_completions: int
    """Number of known values."""
    low: float | None = None
    high: float | None = None
    """`low`, `high`: the value of a success rate if all unknown scores were failures, or successes."""


class ScoreCounts(StrictModel):
    """Counts of the scores of one mode (greedy or sampled) under one task."""

    reward_versions: list[str]
    """Reward versions of the scores; several mean that the service changed during the evaluation."""
    success: str
    """The condition for a success, in words."""
    num_scored: int
    num_unknown: int
    unknown: dict[str, int] = Field(default_factory=dict)
    """Reason -> number of unknown scores."""
    wrong: dict[str, int] = Field(default_factory=dict)
    """Reason -> number of responses without a score because of their own content; they count as failures."""


class ModeReport(StrictModel):
    """The completions of one mode: greedy or sampled."""

    temperature: float
    num_completions: int
    finish_reasons: dict[str, int]
    scores: dict[str, ScoreCounts]
    """Task -> counts."""


class Comparison(StrictModel):
    """A published number and our measurement of the same metric."""

    reference: PublishedNumber
    found: Estimate | None
    """Our measurement; None: not measured."""

    @property
    def difference(self) -> float | None:
        """Our value minus the published value; None if ours is unknown."""
        return None if self.found is None or self.found.value is None else self.found.value - self.reference.value


class EvaluationReport(StrictModel):
    """The content of evaluation.json."""

    schema_version: int = 1
    subject: str
    version: str | None
    params_sha256: str | None
    """`params_sha256` of the version's manifest; None: the model is a folder without a manifest."""
    run: str
    engine: str
    tba_version: str
    finished_at_s: float
    num_prompts: int
    refused_prompts: dict[str, str] = Field(default_factory=dict)
    """Prompt id -> why the engine cannot complete it; its scores are unknown."""
    modes: dict[Mode, ModeReport]
    metrics: dict[str, Estimate]
    """Name -> value, for example greedy.gsm8k.success_rate."""
    references: list[Comparison]
    generation_s: float
    num_generated_tokens: int
    settings: dict[str, Any]
    """`eval.published` and the sampling limits of this evaluation."""


def load_report(path: Path) -> EvaluationReport:
    """Read evaluation.json; raise ConfigError if it is not one of this release."""
    try:
        # a report of another release may have other fields, and numbers of another meaning
        return EvaluationReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"{path} is not an evaluation of this release of tba: {first_line}") from None
