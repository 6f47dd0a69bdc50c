"""The interface of a tracker, and the records that it gets."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Literal, Protocol, runtime_checkable

from tba.api import EvalInfo
from tba.api.evaluations import EvalNumbers
from tba.errors import not_installed
from tba.versions import PolicyVersion

Metrics = Mapping[str, float | None]


@runtime_checkable
class Tracker(Protocol):
    """A sink for metrics. Every method is called in one thread of the tracker's own, and may block and raise anything.

    `start` comes first, and again with every lineage; the last call is `close`. A record that the tracker cannot keep
    is counted and logged; nothing that it does stops or slows the trainer.

    `tracking.trackers` names its class, or a function that makes it. The argument has the sections of the resolved
    recipe that may be shown with the run. If the class or function raises ConfigError, the trainer does not start.
    """

    name: str

    def start(self, record: Record) -> None:
        """Begin a lineage. Older records of steps after `record.step` are void: those steps are trained again."""
        ...

    def log(self, record: Record) -> None:
        """Keep a step or a finished evaluation."""
        ...

    def close(self) -> None:
        """Write pending records, and free all resources."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A start of the trainer, a step, or a finished evaluation.

    `start`: lineage `lineage` continues from version `parent`, whose step is `step`. Records of lineages that are not
    on the way to `parent` are void. `step`: optimizer step (lineage, step); `skipped` says why the weights stayed.
    `evaluation`: of version (lineage, step); `eval_id` names it.
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
        """The known metrics, with the prefix `train/` or `eval/`, by which trackers group their charts."""
        group = "eval" if self.kind == "evaluation" else "train"
        return {f"{group}/{name}": value for name, value in self.metrics.items() if value is not None}

    def line(self) -> str:
        """Return one line of metrics.jsonl, without its newline."""
        document = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(document, allow_nan=False)


def evaluation_record(run: str, evaluation: EvalInfo) -> Record:
    """Return the record of a finished evaluation; pass@k is called `pass_at_k`."""
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


def require(package: str, *, setting: str) -> None:
    """Raise ConfigError if the optional package of a setting is not installed; do not import it."""
    try:
        is_there = find_spec(package) is not None
    except ValueError:  # a module in sys.modules without a spec
        is_there = False
    if not is_there:
        raise not_installed(setting, package)
