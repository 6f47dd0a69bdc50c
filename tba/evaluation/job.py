"""What `tba evaluate` asks of the evaluator process: one JSON file; everything else is in the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from tba.api import Prompt, VersionText
from tba.config.base import StrictModel
from tba.errors import ConfigError

PROGRESS = "progress: "
"""Lines of the evaluator that begin so are for the person who waits."""


class EvaluationJob(StrictModel):
    """One model to evaluate. Paths are absolute."""

    subject: str
    """What is evaluated, in words: `version 1-40 of run gsm8k`, `model folder ...`."""
    model: Path
    """Folder in Hugging Face format."""
    version: VersionText | None = None
    """The weight version in `model`; none: not one of a run."""
    manifest: Path | None = None
    """Manifest of that version: the engine proves that it holds exactly these weights."""
    start: Path | None = None
    """Folder of the starting model; given where perplexity is measured."""
    prompts: Path
    """JSONL: the held-out prompts, in order."""
    out: Path
    """Folder for completions.jsonl and evaluation.json."""


def load_job(path: Path) -> EvaluationJob:
    """Read a job.

    Raises:
        ConfigError: the file cannot be read, or is none.
    """
    try:
        return EvaluationJob.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"evaluation job {path} cannot be read ({first_line}); `tba evaluate` writes it") from None


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write prompts for the evaluator."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(prompt.model_dump_json() + "\n" for prompt in prompts)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a job. A line ends at a line feed alone: texts may hold other separators, such as U+2028."""
    with path.open("rb") as file:
        return [Prompt.model_validate_json(line) for line in file]
