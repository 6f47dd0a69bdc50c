"""A_j of the family of Trajectory Balance objectives.

    A_j = (r_j - mean r) - beta (l_j - centre_j)

    centre theta       mean l                              VarGrad: the paper's Eq. 5 times beta / 2
    centre behaviour   mean l - d for rollouts up to       TBA': the group mean under the behaviour policy
                       `centre_max_age_steps`, mean l
                       beyond; d = mean over the young of
                       (log pi_theta - log pi_behaviour)
    centre none        0                                   Kimi k1.5

VarGrad does not change when one constant is added to every l_j of a group, so it cannot see the drift that all
completions of a prompt share; d is a trust region on exactly that drift. Under a *fixed* stale behaviour it is biased:
hence the age limit.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from tba_trainer.objectives.groups import group_mean
from tba_trainer.objectives.resolved import Objective
from tba_trainer.objectives.sequences import Sequences, behaviour_log_ratio, log_ratio


def family_advantages(sequences: Sequences, objective: Objective, *, beta: float) -> Float[Tensor, " N"]:
    """A_j of every rollout.

    Source: VarGrad gradient of arXiv 2503.18929 Eq. 5; behaviour centring as in its TBA' experiments.
    """
    s = sequences
    ratio = log_ratio(s, objective)
    advantage = s.reward - group_mean(s.reward, s.group) - beta * ratio
    if objective.centre == "none":
        return advantage
    advantage = advantage + beta * group_mean(ratio, s.group)
    if objective.centre == "behaviour":
        young = s.policy_age <= objective.centre_max_age_steps
        drift = group_mean(behaviour_log_ratio(s, objective), s.group, where=young)
        advantage = advantage - beta * drift * young
    return advantage
