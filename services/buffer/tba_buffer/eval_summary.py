"""The numbers of an evaluation: a pure function of the results of its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tba.api import EvalNumbers
from tba.evaluation.estimates import pass_at_k
from tba.numbers import mean
from tba_buffer.eval_units import KINDS, Unit

_PER_PROMPT = ("distinct_1", "distinct_2", "distinct_3", "embedding_distance")
Results = Mapping[Unit, Mapping[str, Any]]
"""unit -> a stored EvalResult; those of older releases lack the newer fields."""


def summarise(results: Results, *, success_reward: float, pass_at: Sequence[int] = ()) -> EvalNumbers:
    """The numbers of a finished evaluation.

    Accuracy is the mean over prompts of the share of successes among the known scores of that prompt; prompts without
    a known score are left out. None where nothing is known.
    """
    successes: dict[str, list[list[bool]]] = {kind: [] for kind in KINDS}
    samples: dict[str, list[Any]] = {name: [] for name in ("rewards", "num_response_tokens", "log_ratios")}
    per_prompt: dict[str, list[float]] = {name: [] for name in _PER_PROMPT}
    num_unknown = 0
    for unit, result in results.items():
        known = [reward for reward in result["rewards"] if reward is not None]
        num_unknown += len(result["rewards"]) - len(known)
        successes[unit.kind].append([reward >= success_reward for reward in known])
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
        kl_to_reference=mean(samples["log_ratios"]),
        num_unknown=num_unknown,
        **{name: mean(values) for name, values in per_prompt.items()},
    )


def summarise_first(
    results: Results, num_prompts: int, *, success_reward: float, pass_at: Sequence[int] = ()
) -> EvalNumbers:
    """The same over the first `num_prompts` held-out prompts alone."""
    first = {unit: result for unit, result in results.items() if unit.number < num_prompts}
    return summarise(first, success_reward=success_reward, pass_at=pass_at)


def count_unknown(results: Results, num_prompts: int) -> dict[str, int]:
    """Kind of unit -> unknown scores over the first `num_prompts` held-out prompts."""
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    for unit, result in results.items():
        if unit.number < num_prompts:
            counts[unit.kind] += sum(reward is None for reward in result["rewards"])
    return counts


def _mean_pass_at(successes: Sequence[Sequence[bool]], k: int) -> float | None:
    """Mean over the prompts of which at least k scores are known."""
    return mean([pass_at_k(len(known), sum(known), k) for known in successes if len(known) >= k])
