"""The job that `tba evaluate` gives the evaluator process, and evaluation.json, the report that comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tba.api import Prompt, VersionText
from tba.config.evaluation import Mode, PublishedNumber
from tba.errors import ConfigError
from tba.fields import StrictModel

PROGRESS = "progress: "
"""Prefix of the evaluator's lines for the person who waits."""


class EvaluationJob(StrictModel):
    """One model to evaluate. Paths are absolute."""

    subject: str
    """The evaluated model in words: `version 1-40 of run gsm8k`, `model folder ...`."""
    model: Path
    """Folder in Hugging Face format."""
    version: VersionText | None = None
    """The weight version in `model`; none: not one of a run."""
    manifest: Path | None = None
    """Manifest of that version: the engine proves that it holds exactly these weights."""
    start: Path | None = None
    """Folder of the starting model; given where perplexity is measured."""
    prompts: list[Prompt]
    """The held-out prompts, in order."""
    out: Path
    """Folder for completions.jsonl and evaluation.json."""


def load_job(path: Path) -> EvaluationJob:
    """Read a job."""
    try:
        return EvaluationJob.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"evaluation job {path} cannot be read ({first_line}); `tba evaluate` writes it") from None


class Estimate(StrictModel):
    """A mean over prompts (or a function of means) with its standard error; None is unknown.

    The standard error counts prompts as independent, but not completions of one prompt. With a single prompt, its
    completions count as independent.
    """

    value: float | None
    stderr: float | None
    num_prompts: int
    """Prompts with at least one known value."""
    num_completions: int
    """Known values."""
    low: float | None = None
    high: float | None = None
    """Bounds of a success rate with unknown scores: its value if every unknown score were a failure, or a success."""


class ScoreCounts(StrictModel):
    """The scores of one mode under one task."""

    reward_versions: list[str]
    """Versions of the reward that scored; more than one: the service changed meanwhile."""
    success: str
    """The condition for a success, in words."""
    num_scored: int
    num_unknown: int
    unknown: dict[str, int] = Field(default_factory=dict)
    """Reason -> number of unknown scores."""
    wrong: dict[str, int] = Field(default_factory=dict)
    """Reason -> number of answers that are themselves why they have no score: failures, and none of `num_unknown`."""


class ModeReport(StrictModel):
    """Greedy completions, or samples."""

    temperature: float
    num_completions: int
    finish_reasons: dict[str, int]
    scores: dict[str, ScoreCounts]
    """By task."""


class Comparison(StrictModel):
    """A published number beside ours."""

    reference: PublishedNumber
    found: Estimate | None
    """None: not measured."""

    @property
    def difference(self) -> float | None:
        """Ours minus the published one."""
        return None if self.found is None or self.found.value is None else self.found.value - self.reference.value


class EvaluationReport(StrictModel):
    """evaluation.json."""

    schema_version: int = 1
    subject: str
    version: str | None
    params_sha256: str | None
    """Digest of the weights, as the manifest states it; None: a folder."""
    run: str
    engine: str
    tba_version: str
    finished_at_s: float
    num_prompts: int
    refused_prompts: dict[str, str] = Field(default_factory=dict)
    """Prompt id -> why the engine cannot complete it; its scores are unknown."""
    modes: dict[Mode, ModeReport]
    metrics: dict[str, Estimate]
    """By name, for example greedy.gsm8k.success_rate."""
    references: list[Comparison]
    generation_s: float
    num_generated_tokens: int
    settings: dict[str, Any]
    """`eval.published` and the sampling limits as they were."""


def load_report(path: Path) -> EvaluationReport:
    """Read evaluation.json."""
    try:
        # a report of another release may have other fields, and numbers of another meaning
        return EvaluationReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"{path} is not an evaluation of this release of tba: {first_line}") from None
