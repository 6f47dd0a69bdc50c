"""The numbers of an evaluation, and the best version so far: pure functions of the stored results.

Two evaluations are compared only if they have the same number of samples and the same success reward, over the same
prompts. Every evaluation takes the first held-out prompts. The first and the last evaluation of a run take more of them
than the others. So each also stores its numbers over the first `eval.num_prompts_compared` prompts, and only these are
compared. An evaluation with too many unknown scores is not compared: a mean over few known ones says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from tba.api import BestVersion, EvalNumbers, EvalResult
from tba.config.evaluation import EvalSection, pass_at_of
from tba.evaluation.statistics import pass_at_k
from tba.fields import Integer, Number, VersionText, mean
from tba.versions import PolicyVersion

KINDS = ("sample", "greedy")
MIN_KNOWN_SHARE = 0.99
"""The share of the compared scores (for pass@K: of the prompts) that must be known."""


@dataclass(frozen=True, slots=True)
class EvaluationUnit:
    """One lease's work in an evaluation: held-out prompt `number`, answered in one way (`kind`: `sample`, `greedy`)."""

    eval_id: str
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.eval_id}|{self.kind}|{self.number}"

    @classmethod
    def parse(cls, text: str) -> EvaluationUnit:
        """Parse the text that `str(unit)` returns."""
        eval_id, kind, number = text.split("|")
        return cls(eval_id, kind, int(number))


Results = Mapping[EvaluationUnit, EvalResult]


class EvalSummary(EvalNumbers):
    """The numbers of a finished evaluation, and when it was finished."""

    finished_at_s: Number


class ComparedNumbers(BaseModel):
    """The numbers over the first prompts, which every evaluation covers; the best version is chosen by these."""

    num_prompts: Integer
    numbers: EvalNumbers
    num_unknown: dict[str, int]
    """Number of unknown scores by kind of unit."""


class StoredEval(BaseModel):
    """An evaluation as Redis holds it, in JSON."""

    eval_id: str
    version: VersionText
    state: Literal["pending", "done"]
    num_prompts: Integer
    num_samples: Annotated[Integer, Field(ge=1, le=4096)]
    success_reward: Number
    pass_at: list[Integer] = []
    created_at_s: Number
    deadline_s: Number
    summary: EvalSummary | None = None
    first: ComparedNumbers | None = None
    """None, like `summary`, until the evaluation is done."""


def with_raised(results: Results, tasks: Mapping[int, str]) -> Results:
    """Return the results; in tasks with a known score `num_raised` counts as wrong. `tasks`: task by prompt number."""
    scored = (unit for unit, result in results.items() if any(reward is not None for reward in result.rewards))
    working = {tasks.get(unit.number) for unit in scored}
    return {
        unit: result.model_copy(update={"num_wrong": (result.num_wrong or 0) + (result.num_raised or 0)})
        if tasks.get(unit.number) in working
        else result
        for unit, result in results.items()
    }


def summarise(results: Results, *, success_reward: float, pass_at: Sequence[int] = ()) -> EvalNumbers:
    """Return the numbers of a finished evaluation.

    Accuracy is the mean over prompts of a prompt's share of successes. The share is taken over the known scores and the
    answers that are wrong without a score; prompts with neither are left out. A number is None if nothing is known.
    """
    successes: dict[str, list[list[bool]]] = {kind: [] for kind in KINDS}
    for unit, result in results.items():
        known = [reward >= success_reward for reward in result.rewards if reward is not None]
        successes[unit.kind].append(known + [False] * (result.num_wrong or 0))
    samples = [result for unit, result in results.items() if unit.kind == "sample"]

    def mean_of(name: str) -> float | None:
        values = [getattr(result, name) for result in samples]
        return mean(value for value in values if value is not None)

    return EvalNumbers(
        accuracy=_mean_pass_at(successes["sample"], 1),
        greedy_accuracy=_mean_pass_at(successes["greedy"], 1),
        pass_at={k: _mean_pass_at(successes["sample"], k) for k in pass_at},
        mean_reward=mean(reward for result in samples for reward in result.rewards if reward is not None),
        mean_response_tokens=mean(number for result in samples for number in result.num_response_tokens),
        num_unknown=sum(count_unknown(results).values()),
        distinct_1=mean_of("distinct_1"),
        distinct_2=mean_of("distinct_2"),
        distinct_3=mean_of("distinct_3"),
        embedding_distance=mean_of("embedding_distance"),
    )


def count_unknown(results: Results) -> dict[str, int]:
    """Return the number of unknown scores by kind of unit. Answers that are wrong without a score are not unknown."""
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    for unit, result in results.items():
        counts[unit.kind] += result.rewards.count(None) - (result.num_wrong or 0)
    return counts


def summarise_first(
    results: Results, num_prompts: int, *, success_reward: float, pass_at: Sequence[int] = ()
) -> ComparedNumbers:
    """Return the numbers over the first `num_prompts` held-out prompts alone."""
    first = {unit: result for unit, result in results.items() if unit.number < num_prompts}
    return ComparedNumbers(
        num_prompts=num_prompts,
        numbers=summarise(first, success_reward=success_reward, pass_at=pass_at),
        num_unknown=count_unknown(first),
    )


def _mean_pass_at(successes: Sequence[Sequence[bool]], k: int) -> float | None:
    """Return the mean pass@k over the prompts with at least k known scores; `successes` has one list per prompt."""
    return mean([pass_at_k(len(known), sum(known), k) for known in successes if len(known) >= k])


def find_best_version(evals: Iterable[StoredEval], section: EvalSection, *, num_heldout: int) -> BestVersion | None:
    """Return the best version by `eval.best_metric`; if several are equal, the newest. None: none can be compared.

    Args:
        num_heldout: number of held-out prompts of the run.
    """
    num_prompts, best = min(section.num_prompts_compared, num_heldout), None
    for each in sorted(evals, key=lambda each: PolicyVersion.parse(each.version)):
        is_same = each.num_samples == section.num_samples and each.success_reward == section.success_reward
        if each.first is None or not is_same or each.first.num_prompts != num_prompts:
            continue
        kind = "greedy" if section.best_metric == "greedy_accuracy" else "sample"
        # an unknown score may leave a whole prompt out of pass@K
        per_prompt = kind == "greedy" or pass_at_of(section.best_metric) is not None
        num_compared = num_prompts if per_prompt else num_prompts * section.num_samples
        # with too many unknown scores the best version stays the best
        if each.first.num_unknown.get(kind, 0) > (1 - MIN_KNOWN_SHARE) * num_compared:
            continue
        value = each.first.numbers.metric(section.best_metric)
        if value is None or not math.isfinite(value) or (best is not None and value < best.value):
            continue
        best = BestVersion(
            version=each.version,
            metric=section.best_metric,
            value=value,
            num_prompts=num_prompts,
            num_samples=section.num_samples,
        )
    return best
