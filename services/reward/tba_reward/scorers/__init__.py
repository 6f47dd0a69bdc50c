"""The kinds of scorers, one per file, found by name: `tba_reward/scorers/KIND.py` defines `build(spec, tools)`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from tba.config.reward import ScorerSpec
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The parts of the service that scorers are built with.

    Attributes:
        pool: the worker processes, shared by all scorers that run in them.
        models: the model processes, one per distinct set of models.
        item_timeout_s: the deadline of an item whose spec has none.
    """

    pool: WorkerPool
    models: ModelPool
    item_timeout_s: float

    def timeout_s(self, spec: ScorerSpec) -> float:
        """Return the deadline of one item of a scorer."""
        return self.item_timeout_s if spec.timeout_s is None else spec.timeout_s


def build_scorer(spec: ScorerSpec, tools: Tools) -> Scorer:
    """Return the scorer of a spec: call `build` of the file that its kind names.

    Raises:
        ConfigError: it cannot be built here.
    """
    kind = importlib.import_module(f"tba_reward.scorers.{spec.kind}")
    return kind.build(spec, tools)
