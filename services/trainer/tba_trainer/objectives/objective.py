"""The objective of a run, resolved from the recipe: preset, overrides and settings in one immutable value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from tba import plugins
from tba.config import ObjectiveSection
from tba.config.objective import DEFAULT_EMA_DECAY, DEFAULT_EMA_EVERY_STEPS, DEFAULT_RESET_STEPS, Anchor, Centre

Kind = Literal[
    "trajectory_balance", "group", "group_std", "leave_one_out", "batch_std", "batch", "best_worst", "custom"
]
"""The formula of A_j: see advantages.py. An objective from outside has none: see `ObjectiveFunction` in loss.py."""
Weight = Literal["none", "clamp", "token_clip", "sequence_clip"]
"""How pi_theta / pi_behaviour weighs the tokens: see loss.py."""
Denominator = Literal["rollouts", "groups", "tokens"]
"""Divisor of the sum over the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The parts of a baseline."""

    kind: Kind
    weight: Weight = "none"
    denominator: Denominator = "rollouts"
    token_mean: bool = False


BASELINES = MappingProxyType(
    {
        "grpo": Baseline(kind="group_std", weight="token_clip", token_mean=True),  # arXiv 2402.03300
        "dr_grpo": Baseline(kind="group", weight="clamp"),  # arXiv 2503.20783
        "rloo": Baseline(kind="leave_one_out"),  # arXiv 2402.14740
        "proximal_rloo": Baseline(kind="leave_one_out", weight="sequence_clip"),  # RLOO with PPO's clip
        "ppo_clip": Baseline(kind="batch_std", weight="token_clip", denominator="tokens"),  # arXiv 1707.06347
        "reinforce": Baseline(kind="batch"),
        "online_dpo": Baseline(kind="best_worst", denominator="groups"),  # arXiv 2402.04792
    }
)
"""The baselines of `objective.preset`; advantages.py has their formulas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One objective with everything decided. Hashable and free of tensors."""

    name: str
    kind: Kind
    weight: Weight
    denominator: Denominator
    token_mean: bool
    """A rollout's share of the loss is the mean over its tokens, not the sum."""
    ratio_per_token: bool
    """Log-ratios l_j are divided by the number of tokens (with `token_mean`: Eq. 5 with mean log-probs)."""
    anchor: Anchor | None
    """The policy that the KL pulls towards; None: there is no KL."""
    centre: Centre
    """Trajectory balance only."""
    age_scaled: bool
    """The log-ratio to the behaviour policy is clamped and divided by the policy age."""
    importance_clamp: float
    clip_range: float
    log_ratio_clamp: float
    centre_max_age_steps: int
    reference_placement: Literal["trainer", "searcher"] | None
    """The service that computes ref log-probs; None: the objective has no reference."""
    reset_steps: int | None
    """The reference becomes theta after every so many steps; None: never."""
    ema_decay: float | None
    """reference = decay * reference + (1 - decay) * theta, every `ema_every_steps`; None: it stays."""
    ema_every_steps: int | None
    function: Callable[..., Tensor] | None = None
    """An `ObjectiveFunction` (loss.py), which takes the place of formula, weight and denominator."""

    @property
    def needs_reference(self) -> bool:
        """Whether ref log-probs enter. If not, `Sequences.ref_logprob` is zeros and no reference model is built."""
        return self.reference_placement is not None

    @property
    def reads_theta(self) -> bool:
        """Whether A_j depends on theta's log-probs. If not, `Sequences.logprob` may be zeros: no pass is needed."""
        return self.anchor is not None or self.kind == "custom"

    @property
    def needs_complete_groups(self) -> bool:
        """Whether A_j depends on theta's log-probs of the *other* rollouts of its group.

        A group that spans micro-batches then needs a first pass. If not (but `reads_theta`), a micro-batch may call
        `advantages` on the whole batch with only its own rows of `Sequences.logprob` filled in, and take its own rows
        of the result.
        """
        return self.reads_theta and not (self.kind == "trajectory_balance" and self.centre == "none")

    @property
    def needs_complete_batch(self) -> bool:
        """Whether A_j depends on rollouts of *other* groups: `advantages` then takes the whole batch at once."""
        return self.kind in ("batch", "batch_std", "custom")


def resolve(section: ObjectiveSection) -> Objective:
    """Resolve the recipe's section.

    Raises:
        ConfigError: the preset is an objective from outside that cannot be imported.
    """
    member, anchor, function = section.member, section.used_anchor, None
    centre: Centre
    if section.is_custom:
        baseline = Baseline(kind="custom")
        centre, age_scaled = "none", False
        function = plugins.load(section.preset, group="tba.objectives", what="objective.preset")
    elif member is None:
        baseline = BASELINES[section.preset]
        centre, age_scaled = "none", False
    else:
        weight: Weight = member.importance_weight
        baseline = Baseline(kind="trajectory_balance", weight=weight, token_mean=member.length_normalise)
        centre, age_scaled = member.centre, member.age_scaled
    ema = anchor == "ema"
    return Objective(
        name=section.preset,
        kind=baseline.kind,
        weight=baseline.weight,
        denominator=baseline.denominator,
        token_mean=baseline.token_mean,
        ratio_per_token=member is not None and member.length_normalise,
        anchor=anchor,
        centre=centre,
        age_scaled=age_scaled,
        importance_clamp=section.importance_clamp,
        clip_range=section.clip_range,
        log_ratio_clamp=section.log_ratio_clamp,
        centre_max_age_steps=section.centre_max_age_steps,
        reference_placement=section.reference_placement if section.needs_reference else None,
        reset_steps=(section.reference_reset_steps or DEFAULT_RESET_STEPS) if anchor == "reset" else None,
        ema_decay=(section.ema_decay or DEFAULT_EMA_DECAY) if ema else None,
        ema_every_steps=(section.ema_every_steps or DEFAULT_EMA_EVERY_STEPS) if ema else None,
        function=function,
    )
