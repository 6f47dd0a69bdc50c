"""The objective: one family of losses, with the paper's members as named presets (docs/algorithm.md).

For rollout j of a group, with sequence sums over its response tokens,

    l_j = log pi_theta(y_j) - log pi_anchor(y_j)
    A_j = (r_j - mean r) - beta (l_j - mean l) - beta [centred_j] d
    d   = mean over the group's centred rollouts of (log pi_theta - log pi_behaviour)
    loss = -(1 / num_rollouts) sum_j sum_t stopgrad(A_j w_jt) log pi_theta(y_jt)

Without `d` this is VarGrad Trajectory Balance (the paper's Eq. 5) times beta / 2: the "A-form", whose gradients have
the scale of REINFORCE at any beta. `d` moves the centre of the KL from theta to the behaviour policy (TBA'): a trust
region on the drift that all completions of a prompt share, which VarGrad cannot see. Under a fixed stale behaviour
that term is biased, so it covers only rollouts up to `centre_max_age_steps`; beyond it the centre is theta.

Differences from the published code: group statistics are per prompt (there they run over the micro-batch), and the
scale is the A-form (there 1 / beta^2, which keeps any gradient clip permanently active).

Shapes: N rollouts, B rollouts of one micro-batch, R response tokens (padded on the right).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.config import ObjectiveSection
from tba.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One member of the family: which anchor, which centre, whether tokens are weighted."""

    anchor: Literal["fixed", "reset"]
    """The reference policy: the starting model for ever, or reset to theta every `reference_reset_steps`."""
    centre: Literal["theta", "behaviour"]
    """Under which policy the group mean of the log-ratio is taken."""
    weighted: bool
    """Token importance weight clamp(pi_theta / pi_behaviour, 0, importance_clamp), or none."""


PRESETS = MappingProxyType(
    {
        "tb": Preset(anchor="fixed", centre="theta", weighted=False),
        "tba_prime": Preset(anchor="reset", centre="behaviour", weighted=True),
        "tba_prime_unweighted": Preset(anchor="reset", centre="behaviour", weighted=False),
    }
)
"""The names that `objective.preset` may have (reference: arXiv 2503.18929, Eq. 5 and its prime-rl fork)."""


def preset_of(section: ObjectiveSection) -> Preset:
    """The preset that the recipe names.

    Raises:
        ConfigError: no preset has this name.
    """
    if section.preset not in PRESETS:
        raise ConfigError(f"objective.preset {section.preset!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[section.preset]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """What advantages need of N rollouts whose groups are complete. Log-probs are sums over response tokens."""

    logprob: Float[Tensor, " N"]
    """log pi_theta at the policy temperature; no gradient flows through it."""
    sampler_logprob: Float[Tensor, " N"]
    """log pi_behaviour at the rollout's own sampling temperature."""
    ref_logprob: Float[Tensor, " N"]
    """log pi_anchor at the policy temperature."""
    reward: Float[Tensor, " N"]
    policy_age: Int[Tensor, " N"]
    """Optimizer steps."""
    group: Int[Tensor, " N"]
    """Rollouts of one prompt share a number; any numbers will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs:
    """One micro-batch of B rollouts."""

    logprobs: Float[Tensor, "B R"]
    """log pi_theta per token, with gradient; 0 where `mask` is false."""
    sampler_logprobs: Float[Tensor, "B R"]
    ref_logprob: Float[Tensor, " B"]
    mask: Bool[Tensor, "B R"]
    """True at response tokens, the end-of-sequence token included."""
    reward: Float[Tensor, " B"]
    policy_age: Int[Tensor, " B"]
    group: Int[Tensor, " B"]
    advantage: Float[Tensor, " B"] | None = None
    """Given when a group spans micro-batches and its statistics came from a first pass; None: computed here."""

    def sequences(self) -> Sequences:
        """The sequence sums, detached."""
        return Sequences(
            logprob=self.logprobs.detach().sum(dim=1),
            sampler_logprob=(self.sampler_logprobs * self.mask).sum(dim=1),
            ref_logprob=self.ref_logprob,
            reward=self.reward,
            policy_age=self.policy_age,
            group=self.group,
        )


def group_mean(
    values: Float[Tensor, " N"], group: Int[Tensor, " N"], where: Bool[Tensor, " N"] | None = None
) -> Float[Tensor, " N"]:
    """The mean of each rollout's group, over the members where `where` holds (0 for a group with none)."""
    _, index = group.unique(return_inverse=True)
    weight = torch.ones_like(values) if where is None else where.to(values.dtype)
    num_groups = int(index.max()) + 1
    total = values.new_zeros(num_groups).index_add(0, index, values * weight)
    count = values.new_zeros(num_groups).index_add(0, index, weight)
    return (total / count.clamp(min=1.0))[index]


def advantages(sequences: Sequences, section: ObjectiveSection, *, beta: float) -> Float[Tensor, " N"]:
    """A_j of every rollout, detached; the groups in `sequences` must be complete.

    Source: VarGrad gradient of arXiv 2503.18929 Eq. 5; behaviour centring as in its TBA' experiments.
    """
    s = sequences
    log_ratio = s.logprob - s.ref_logprob
    advantage = s.reward - group_mean(s.reward, s.group) - beta * (log_ratio - group_mean(log_ratio, s.group))
    if preset_of(section).centre == "behaviour":
        centred = s.policy_age <= section.centre_max_age_steps
        drift = group_mean(s.logprob - s.sampler_logprob, s.group, where=centred)
        advantage = advantage - beta * drift * centred
    return advantage.detach()


def token_weights(
    logprobs: Float[Tensor, "B R"], sampler_logprobs: Float[Tensor, "B R"], section: ObjectiveSection
) -> Float[Tensor, "B R"]:
    """clamp(pi_theta / pi_behaviour, 0, importance_clamp), detached; ones where the preset has no weight."""
    if not preset_of(section).weighted:
        return torch.ones_like(logprobs)
    return (logprobs.detach() - sampler_logprobs).exp().clamp(min=0.0, max=section.importance_clamp)


def objective(
    inputs: ObjectiveInputs, section: ObjectiveSection, *, beta: float, num_rollouts: int
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """The loss of one micro-batch and its sums; both add up over the micro-batches of a batch.

    Args:
        beta: KL coefficient at this step.
        num_rollouts: rollouts of the whole batch, the denominator.

    Returns:
        The loss (A-form, sum over this micro-batch divided by `num_rollouts`), and metrics that are shares of the
        whole batch: `loss`, `advantage_abs_mean`.
    """
    advantage = inputs.advantage
    if advantage is None:
        advantage = advantages(inputs.sequences(), section, beta=beta)
    weight = token_weights(inputs.logprobs, inputs.sampler_logprobs, section)
    coefficient = advantage.detach()[:, None] * weight * inputs.mask  # [B, R]
    loss = -(coefficient * inputs.logprobs).sum() / num_rollouts
    metrics = {
        "loss": float(loss.detach()),
        "advantage_abs_mean": float(advantage.abs().sum()) / num_rollouts,
    }
    return loss, metrics
