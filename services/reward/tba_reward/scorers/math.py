"""Kind `math`: compare the final answer with the gold answer, by math-verify in worker processes (docs/rewards.md)."""

from __future__ import annotations

from tba.config.reward import MathSpec
from tba_reward.process_pool.job import WorkerRule
from tba_reward.scorer import Item, Scorer, installed_version, params_of, version_of
from tba_reward.scorers import Tools
from tba_reward.scorers.in_process_pool import ProcessPoolScorer

IMPLEMENTATION = 5
_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")


def build(spec: MathSpec, tools: Tools) -> Scorer:
    """Return the scorer."""
    params, releases = params_of(spec), [installed_version(spec.kind, name) for name in _PACKAGES]
    warm_up = "tba_reward.math.grader:warm_up"
    example = Item(prompt="", response=r"so it is $\boxed{\frac{2}{4}\pi}$.", data={spec.field: r"\frac{\pi}{2}"})
    return ProcessPoolScorer(
        WorkerRule(function="tba_reward.math.grader:score", params=params, prepare=warm_up),
        pool=tools.pool,
        timeout_s=spec.timeout_s,
        # another release of these packages may read an answer otherwise, which makes it another reward
        version=version_of(spec, IMPLEMENTATION, *releases),
        example=example,
        # a gold answer that hangs the grader is told from a response that does
        check=WorkerRule(function="tba_reward.math.grader:check", params=params),
    )
