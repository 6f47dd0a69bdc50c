"""What trackers are told, and how metrics.jsonl writes it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from tba.api import EvalInfo
from tba.api.evals import EvalNumbers
from tba.versions import PolicyVersion

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A start of the trainer, a step, or a finished evaluation.

    `start`: lineage `lineage` goes on from version `parent`, whose step is `step`; what lineages beside the way to
    `parent` have said is void. `step`: optimizer step (lineage, step); `skipped` says why the weights stayed as they
    were. `evaluation`: of version (lineage, step); `eval_id` names it.
    """

    kind: Literal["start", "step", "evaluation"]
    run: str
    lineage: int
    step: int
    at_s: float = field(default_factory=time.time)
    """Unix seconds at which the record was made."""
    parent: str | None = None
    skipped: str | None = None
    eval_id: str | None = None
    metrics: Metrics = field(default_factory=dict)
    """None: unknown, or not a finite number."""

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics that are known, with `train/` or `eval/` before their names: trackers draw a group each."""
        group = "eval" if self.kind == "evaluation" else "train"
        return {f"{group}/{name}": value for name, value in self.metrics.items() if value is not None}

    def line(self) -> str:
        """One line of metrics.jsonl, without its end."""
        document = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(document, allow_nan=False)


def start_record(run: str, lineage: int, parent: PolicyVersion) -> Record:
    """A trainer begins."""
    return Record(kind="start", run=run, lineage=lineage, step=parent.step, parent=str(parent))


def step_record(run: str, version: PolicyVersion, metrics: Metrics, *, skipped: str | None) -> Record:
    """An optimizer step was made or skipped."""
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()}
    return Record(kind="step", run=run, lineage=version.lineage, step=version.step, skipped=skipped, metrics=finite)


def evaluation_record(run: str, evaluation: EvalInfo) -> Record:
    """An evaluation is done; pass@k is called `pass_at_k`."""
    version = PolicyVersion.parse(evaluation.version)
    numbers = evaluation.model_dump(include=set(EvalNumbers.model_fields) - {"pass_at"})
    numbers |= {f"pass_at_{k}": value for k, value in evaluation.pass_at.items()}
    return Record(
        kind="evaluation",
        run=run,
        lineage=version.lineage,
        step=version.step,
        eval_id=evaluation.eval_id,
        metrics={**numbers, "num_prompts": evaluation.num_prompts},
    )
