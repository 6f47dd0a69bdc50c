"""Objectives: pure functions from log-probs and rewards to a loss (docs/algorithm.md).

Every objective is in policy-gradient form. Its gradient is

    sum_jt c_jt grad log pi_theta(y_jt),    c_jt = -A_j w_jt / divisor_j,    c detached

and so it has two parts: `advantages` gives A_j from sequence sums and rewards (of a whole group or batch at once), and
`objective_loss` gives the token weights w_jt and the loss of one micro-batch. Losses and metrics add up over
micro-batches and ranks.

    resolve(recipe.objective)             -> Objective      objective.py: preset, overrides and settings
    Sequences, advantages                 -> A_j            advantages.py: one function per formula
    Tokens, Totals, token_weights         -> w_jt           clipping.py: clips, clamps, masks of importance ratios
    objective_loss                        -> loss           loss.py: what a token's term is divided by
    ObjectiveFunction, custom_loss        -> loss           loss.py: a user's function instead of A_j and w_jt
"""

from tba_trainer.objectives.advantages import Sequences, advantages, is_tied, reward_spread
from tba_trainer.objectives.clipping import Tokens, Totals, log_ratios, second_moment_cut
from tba_trainer.objectives.loss import ObjectiveFunction, custom_loss, objective_loss
from tba_trainer.objectives.objective import Objective, resolve

__all__ = [
    "Objective",
    "ObjectiveFunction",
    "Sequences",
    "Tokens",
    "Totals",
    "advantages",
    "custom_loss",
    "is_tied",
    "log_ratios",
    "objective_loss",
    "resolve",
    "reward_spread",
    "second_moment_cut",
]
