"""The numbers of an evaluation, and the best version so far: pure functions of the stored results.

Two evaluations are compared only where they measure the same: with the same number of samples and the same success
reward, on the same prompts. Every evaluation takes the first held-out prompts, the first and the last of a run more of
them than those in between. So each keeps its numbers over the first `eval.num_prompts_compared` too, and these are
compared. An evaluation with too many unknown scores is not compared: a mean over the few known ones may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.api import BestVersion, EvalNumbers
from tba.config.evaluation import EvalSection, pass_at_of
from tba.evaluation.statistics import pass_at_k
from tba.fields import mean
from tba.versions import PolicyVersion

KINDS = ("sample", "greedy")


@dataclass(frozen=True, slots=True)
class EvaluationUnit:
    """One kind (`sample`, `greedy`) of one held-out prompt of one evaluation."""

    eval_id: str
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.eval_id}|{self.kind}|{self.number}"

    @classmethod
    def parse(cls, text: str) -> EvaluationUnit:
        """Read what `str` wrote."""
        eval_id, kind, number = text.split("|")
        return cls(eval_id, kind, int(number))


_PER_PROMPT = ("distinct_1", "distinct_2", "distinct_3", "embedding_distance")
Results = Mapping[EvaluationUnit, Mapping[str, Any]]
"""Unit -> a stored EvalResult."""


def with_raised(results: Results, tasks: Mapping[int, str]) -> Results:
    """Count answers that a scorer raised for as wrong, where it scores others of their task (`tasks`: by prompt)."""
    scored = (unit for unit, result in results.items() if any(reward is not None for reward in result["rewards"]))
    working = {tasks.get(unit.number) for unit in scored}
    return {
        unit: {**result, "num_wrong": (result.get("num_wrong") or 0) + (result.get("num_raised") or 0)}
        if tasks.get(unit.number) in working
        else result
        for unit, result in results.items()
    }


def summarise(results: Results, *, success_reward: float, pass_at: Sequence[int] = ()) -> EvalNumbers:
    """Return the numbers of a finished evaluation.

    Accuracy is the mean over prompts of the share of successes among the known scores of that prompt and the answers
    that are wrong without one; prompts without either are left out. None where nothing is known.
    """
    successes: dict[str, list[list[bool]]] = {kind: [] for kind in KINDS}
    samples: dict[str, list[Any]] = {name: [] for name in ("rewards", "num_response_tokens")}
    per_prompt: dict[str, list[float]] = {name: [] for name in _PER_PROMPT}
    num_unknown = 0
    for unit, result in results.items():
        known = [reward for reward in result["rewards"] if reward is not None]
        num_wrong = result.get("num_wrong") or 0
        num_unknown += len(result["rewards"]) - len(known) - num_wrong
        successes[unit.kind].append([reward >= success_reward for reward in known] + [False] * num_wrong)
        if unit.kind == "sample":
            for name, values in samples.items():
                values += [value for value in result.get(name) or () if value is not None]
            for name, values in per_prompt.items():
                if (value := result.get(name)) is not None:
                    values.append(value)
    return EvalNumbers(
        accuracy=_mean_pass_at(successes["sample"], 1),
        greedy_accuracy=_mean_pass_at(successes["greedy"], 1),
        pass_at={k: _mean_pass_at(successes["sample"], k) for k in pass_at},
        mean_reward=mean(samples["rewards"]),
        mean_response_tokens=mean(samples["num_response_tokens"]),
        num_unknown=num_unknown,
        **{name: mean(values) for name, values in per_prompt.items()},
    )


def summarise_first(
    results: Results, num_prompts: int, *, success_reward: float, pass_at: Sequence[int] = ()
) -> EvalNumbers:
    """Return the numbers over the first `num_prompts` held-out prompts alone."""
    first = {unit: result for unit, result in results.items() if unit.number < num_prompts}
    return summarise(first, success_reward=success_reward, pass_at=pass_at)


def count_unknown(results: Results, num_prompts: int) -> dict[str, int]:
    """Return kind of unit -> unknown scores over the first `num_prompts` held-out prompts."""
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    for unit, result in results.items():
        if unit.number < num_prompts:
            counts[unit.kind] += result["rewards"].count(None) - (result.get("num_wrong") or 0)
    return counts


def _mean_pass_at(successes: Sequence[Sequence[bool]], k: int) -> float | None:
    """Return the mean over the prompts with at least k known scores."""
    return mean([pass_at_k(len(known), sum(known), k) for known in successes if len(known) >= k])


MIN_KNOWN_SHARE = 0.99
"""The share of the compared scores (for pass@K: of the prompts) that must be known."""


def find_best_version(
    documents: Iterable[dict[str, Any]], section: EvalSection, *, num_heldout: int
) -> BestVersion | None:
    """Return the best of the finished evaluations; of equal ones, that of the newest version, which has learned most.

    Args:
        documents: stored evaluations (evaluations.py).
        num_heldout: held-out prompts of the run.
    """
    num_prompts, best = min(section.num_prompts_compared, num_heldout), None
    done = (document for document in documents if document["state"] == "done")
    for document in sorted(done, key=lambda document: PolicyVersion.parse(document["version"])):
        numbers = _compared_numbers(document, section, num_prompts)
        # with too many unknown scores the best version stays the best
        if numbers is None or not _is_known(document, numbers, section, num_prompts):
            continue
        value = numbers.metric(section.best_metric)
        if value is None or not math.isfinite(value) or (best is not None and value < best.value):
            continue
        best = BestVersion(
            version=document["version"],
            metric=section.best_metric,
            value=value,
            num_prompts=num_prompts,
            num_samples=section.num_samples,
        )
    return best


def _compared_numbers(document: dict[str, Any], section: EvalSection, num_prompts: int) -> EvalNumbers | None:
    """Return the numbers over exactly the compared prompts; None where the evaluation has none."""
    same = document["num_samples"] == section.num_samples and document["success_reward"] == section.success_reward
    if not same:
        return None
    if document["num_prompts"] == num_prompts:
        return EvalNumbers.model_validate({k: v for k, v in document["summary"].items() if k != "finished_at_s"})
    first = document.get("first")
    if first is None or first["num_prompts"] != num_prompts:
        return None
    return EvalNumbers.model_validate(first["numbers"])


def _is_known(document: dict[str, Any], numbers: EvalNumbers, section: EvalSection, num_prompts: int) -> bool:
    """Return whether enough of the compared scores are known."""
    kind = "greedy" if section.best_metric == "greedy_accuracy" else "sample"
    # where the count by kind cannot be read, the unknown scores of all kinds count
    num_unknown = document.get("first", {}).get("num_unknown", {}).get(kind, numbers.num_unknown)
    # an unknown score may leave a whole prompt out of pass@K
    per_prompt = kind == "greedy" or pass_at_of(section.best_metric) is not None
    num_compared = num_prompts if per_prompt else num_prompts * section.num_samples
    return num_unknown <= (1 - MIN_KNOWN_SHARE) * num_compared
