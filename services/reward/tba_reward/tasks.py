"""Which tasks a service scores: those of the recipe, and the built-in ones."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from tba.config.reward import ExactSpec, LastNumberSpec, MakeNSpec, MathSpec, RewardSection, ScorerSpec, TaskReward
from tba.errors import ConfigError
from tba.logs import get_logger
from tba_reward.cache import CachedScorer, ScoreCache
from tba_reward.composition import Composition
from tba_reward.metrics import Metrics
from tba_reward.part import Part
from tba_reward.scorers.base import Scorer, Tools
from tba_reward.scorers.inline import InlineScorer

BUILT_IN: Mapping[str, TaskReward] = {
    "addition": TaskReward(scorers=[ExactSpec(kind="exact", compare="integer")]),
    "exact": TaskReward(scorers=[ExactSpec(kind="exact")]),
    "gsm8k": TaskReward(scorers=[LastNumberSpec(kind="last_number")]),
    "make_n": TaskReward(scorers=[MakeNSpec(kind="make_n")]),
    "math": TaskReward(scorers=[MathSpec(kind="math")]),
}
"""Tasks that need no entry in a recipe. Those that need worker processes start with their first item."""
log = get_logger("tasks")


def build_tasks(section: RewardSection, tools: Tools, cache: ScoreCache, metrics: Metrics) -> dict[str, Composition]:
    """All tasks by name; nothing is started.

    Raises:
        ConfigError: a scorer of the recipe cannot be built.
    """
    tasks: dict[str, Composition] = {}
    for task, config in section.tasks.items():
        try:
            parts = [_part(task, spec, tools, cache, metrics) for spec in config.scorers]
        except ConfigError as error:
            raise ConfigError(f"reward.tasks.{task}: {error}") from None
        tasks[task] = Composition(task, config, parts, is_required=True)
    for task, config in BUILT_IN.items():
        if task in tasks:
            continue
        try:
            parts = [_part(task, spec, tools, cache, metrics) for spec in config.scorers]
        except ConfigError as error:  # a package is not installed, and nobody has asked for it
            log.info("built-in task left out", task=task, detail=str(error))
            continue
        tasks[task] = Composition(task, config, parts, is_required=all(part.is_inline for part in parts))
    return dict(sorted(tasks.items()))


def build_scorer(spec: ScorerSpec, tools: Tools) -> Scorer:
    """The scorer of a spec: `build` in the file that its kind names.

    Raises:
        ConfigError: it cannot be built here.
    """
    kind = importlib.import_module(f"tba_reward.scorers.{spec.kind}")
    return kind.build(spec, tools)


def _part(task: str, spec: ScorerSpec, tools: Tools, cache: ScoreCache, metrics: Metrics) -> Part:
    scorer = build_scorer(spec, tools)
    is_inline = isinstance(scorer, InlineScorer)
    if spec.cache and not is_inline:  # looking it up would cost what scoring inline does
        scorer = CachedScorer(scorer, cache, metrics)
    return Part(task, spec, scorer, metrics, is_inline=is_inline)
