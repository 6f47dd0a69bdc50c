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
    """

    pool: WorkerPool
    models: ModelPool


def build_scorer(spec: ScorerSpec, tools: Tools) -> Scorer:
    """Return the scorer of a spec, from `build` in the module that has the name of its kind."""
    kind = importlib.import_module(f"tba_reward.scorers.{spec.kind}")
    return kind.build(spec, tools)
