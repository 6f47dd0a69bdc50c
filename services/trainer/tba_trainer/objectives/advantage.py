"""A_j of any objective."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from tba_trainer.objectives.baselines import baseline_advantages
from tba_trainer.objectives.family import family_advantages
from tba_trainer.objectives.resolved import Objective
from tba_trainer.objectives.sequences import Sequences


def advantages(sequences: Sequences, objective: Objective, *, beta: float) -> Float[Tensor, " N"]:
    """A_j of every rollout, detached.

    Args:
        sequences: whole groups; the whole batch where `objective.needs_complete_batch`.
        beta: KL coefficient of this step.
    """
    if not len(sequences.reward):
        return sequences.reward.detach()
    of = family_advantages if objective.kind == "family" else baseline_advantages
    return of(sequences, objective, beta=beta).detach()
