"""evaluation.json: every number of an evaluation with its standard error, and what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tba.config.base import StrictModel
from tba.config.published import Mode, PublishedNumber
from tba.errors import ConfigError

SCHEMA = 1


class Estimate(StrictModel):
    """A mean over prompts (or a function of means) with its standard error; None is unknown.

    The standard error counts prompts as independent, completions of one prompt not; with a single prompt its
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
    """Of a success rate with unknown scores: its value if every unknown one were a failure, or a success."""


class ScoreCounts(StrictModel):
    """The scores of one mode under one task."""

    reward_versions: list[str]
    """Versions of the reward that scored; more than one: the service changed meanwhile."""
    success: str
    """When a completion succeeds, in words."""
    num_scored: int
    num_unknown: int
    unknown: dict[str, int] = Field(default_factory=dict)
    """Reason -> how many scores are unknown for it."""


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

    schema_version: int = SCHEMA
    subject: str
    version: str | None
    params_sha256: str | None
    """Digest of the weights, as manifests state it; None: they are not stored as safetensors."""
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
    """Read evaluation.json.

    Raises:
        ConfigError: it is missing or damaged.
    """
    try:
        return EvaluationReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"{path} is no evaluation of this release of tba: {first_line}") from None
