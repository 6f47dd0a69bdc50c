"""The best version so far: a pure function of the stored evaluations, so it is as durable as they are.

Two evaluations are compared only where they say the same thing: with the same number of samples and the same success
reward, and on the same prompts. Every evaluation takes the first held-out prompts, the first and the last of a run more
of them than those in between; so each keeps its numbers over the first `eval.num_prompts_compared` too, and those
count. An evaluation of which too many scores are unknown is not compared: a mean over the few that are known may be
anything, and the best version stays the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tba.api import BestVersion, EvalNumbers
from tba.config.evaluation import EvalSection, pass_at_of

MIN_KNOWN_SHARE = 0.99
"""Of the compared scores (for pass@K: of the prompts), what must be known."""


def best_version(documents: Iterable[dict[str, Any]], section: EvalSection, *, num_heldout: int) -> BestVersion | None:
    """The best of the finished evaluations; of equal ones, the one that finished first.

    Args:
        documents: stored evaluations (evals.py).
        num_heldout: held-out prompts of the run.
    """
    num_prompts, best = min(section.num_prompts_compared, num_heldout), None
    done = (document for document in documents if document["state"] == "done")
    for document in sorted(done, key=lambda document: document["summary"]["finished_at_s"]):
        numbers = _compared_numbers(document, section, num_prompts)
        if numbers is None or not _is_known(document, numbers, section, num_prompts):
            continue
        value = numbers.metric(section.best_metric)
        if value is None or not math.isfinite(value) or (best is not None and value <= best.value):
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
    """The numbers over exactly the compared prompts; None where the evaluation has none such."""
    same = document["num_samples"] == section.num_samples and document["success_reward"] == section.success_reward
    if not same:
        return None
    if document["num_prompts"] == num_prompts:
        return EvalNumbers.model_validate({k: v for k, v in document["summary"].items() if k != "finished_at_s"})
    first = document.get("first")  # evaluations of older releases have none
    if first is None or first["num_prompts"] != num_prompts:
        return None
    return EvalNumbers.model_validate(first["numbers"])


def _is_known(document: dict[str, Any], numbers: EvalNumbers, section: EvalSection, num_prompts: int) -> bool:
    """Whether enough of the compared scores are known. Older releases counted those of all kinds together: then all
    unknown scores count."""
    kind = "greedy" if section.best_metric == "greedy_accuracy" else "sample"
    num_unknown = document.get("first", {}).get("num_unknown", {}).get(kind, numbers.num_unknown)
    # an unknown score may leave a whole prompt out of pass@K
    per_prompt = kind == "greedy" or pass_at_of(section.best_metric) is not None
    num_compared = num_prompts if per_prompt else num_prompts * section.num_samples
    return num_unknown <= (1 - MIN_KNOWN_SHARE) * num_compared
