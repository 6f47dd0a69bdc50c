"""Objectives: pure functions from log-probs and rewards to a loss (docs/algorithm.md).

Every objective is in policy-gradient form. Its gradient is

    sum_jt c_jt grad log pi_theta(y_jt),    c_jt = -A_j w_jt / denominator,    c detached

so there are two steps: `advantages` gives A_j from sequence sums and rewards (a whole group, or batch, at once), and
`objective_loss` gives the token weights and the loss of one micro-batch. Losses and metrics add up over micro-batches
and ranks.

    resolve(recipe.objective)  -> Objective      what is trained: preset, overrides, settings
    Sequences, advantages      -> A_j            family.py, baselines.py
    Tokens, Totals, objective_loss               loss.py
"""

from tba_trainer.objectives.advantage import advantages
from tba_trainer.objectives.groups import tied_group_share
from tba_trainer.objectives.loss import Tokens, Totals, objective_loss
from tba_trainer.objectives.resolved import Objective, resolve
from tba_trainer.objectives.sequences import Sequences

__all__ = [
    "Objective",
    "Sequences",
    "Tokens",
    "Totals",
    "advantages",
    "objective_loss",
    "resolve",
    "tied_group_share",
]
