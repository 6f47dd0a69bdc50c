"""The recipe's section `[objective]`, and the table of built-in presets (docs/algorithm.md).

Every service reads it, so it is not part of the trainer. A searcher must know whether it computes ref log-probs, and
the buffer must know whether beta may be changed live. The formulas are in tba_trainer.objectives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tba import plugins
from tba.config.schedules import KlCoefficient, Schedule
from tba.fields import StrictModel

Kind = Literal["trajectory_balance", "group", "group_std", "leave_one_out", "batch_std", "batch", "best_worst", "best"]
"""The formula of the advantage A_j."""
Anchor = Literal["fixed", "reset", "behaviour"]
Centre = Literal["theta", "behaviour", "none"]
RewardBaseline = Literal["mean", "log_mean_exp"]
ImportanceWeight = Literal[
    "none", "clamp", "mask", "token_clip", "sequence_clip", "sequence_mean_clip", "second_moment"
]
Aggregation = Literal["rollouts", "groups", "tokens", "sequence_mean", "whole_sequence_mean", "constant"]
OldPolicy = Literal["sampler", "trainer"]

NO_AGE_LIMIT = 2**31 - 1
CLIPS: tuple[ImportanceWeight, ...] = ("token_clip", "sequence_clip", "sequence_mean_clip")
"""The importance weights that are variants of PPO's clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All choices that define an objective. Some are keys of `[objective]` too, and a recipe can override them."""

    kind: Kind = "trajectory_balance"
    beta: float = 0.05
    anchor: Anchor | None = None
    """None: `fixed` if beta is above 0 at any step; otherwise there is no KL."""
    centre: Centre = "none"
    reward_baseline: RewardBaseline = "mean"
    importance_weight: ImportanceWeight = "none"
    """Token weight from rho = pi_theta / pi_old. `none`: 1. `clamp`: min(rho, `importance_clamp`). `mask`: rho, or 0
    above `importance_clamp`. `token_clip`, `sequence_clip`, `sequence_mean_clip`: PPO's clip of rho per token, of its
    product over a rollout, of its geometric mean over a rollout. `second_moment`: rho, or 0 for the tokens that push
    the second moment of log rho above its limit."""
    negative_weight: float = 1.0
    """Factor on every A_j below 0. At 0, rollouts below their group's baseline have no gradient, and the policy only
    imitates the better ones."""
    aggregation: Aggregation = "rollouts"
    old_policy: OldPolicy = "sampler"
    """Source of the log-probs of pi_old. `sampler`: as reported with the rollout. `trainer`: the trainer computes them
    again, with the weights that sampled the rollout."""
    age_scaled: bool = False
    clip_range: float = 0.2
    clip_range_high: float = 0.2
    importance_clamp: float = 8.0
    centre_max_age_steps: int = 32
    log_ratio_token_clamp: float | None = None


PRESETS = MappingProxyType(
    {
        # the family
        "tb": Parts(anchor="fixed", centre="theta"),  # arXiv 2503.18929, Eq. 5
        "tba_prime": Parts(anchor="reset", centre="behaviour", importance_weight="clamp"),
        "tba_prime_clip": Parts(anchor="reset", centre="behaviour", importance_weight="token_clip"),
        "tba_prime_unweighted": Parts(anchor="reset", centre="behaviour"),
        # TBA' as its authors published it (arXiv 2503.18929, section 4.3, and their code)
        "tba_prime_published": Parts(
            anchor="reset",
            centre="behaviour",
            importance_weight="mask",
            aggregation="whole_sequence_mean",
            old_policy="trainer",
            centre_max_age_steps=NO_AGE_LIMIT,
            log_ratio_token_clamp=10.0,
            beta=0.005,
        ),
        "kimi": Parts(anchor="behaviour"),  # Kimi k1.5, arXiv 2501.12599
        "tb_behaviour": Parts(anchor="behaviour", centre="theta", age_scaled=True),
        "oapl": Parts(anchor="behaviour", reward_baseline="log_mean_exp"),  # arXiv 2602.19362
        # VarGrad's Trajectory Balance from the sampling policy, without what lies below the baseline
        "tb_positive": Parts(anchor="behaviour", centre="theta", negative_weight=0.0),
        # the baselines
        "grpo": Parts(kind="group_std", beta=0.0, importance_weight="token_clip", aggregation="sequence_mean"),
        "dr_grpo": Parts(kind="group", beta=0.0, importance_weight="token_clip", aggregation="constant"),
        "dr_grpo_clamp": Parts(kind="group", beta=0.0, importance_weight="clamp"),
        "dapo": Parts(
            kind="group_std", beta=0.0, importance_weight="token_clip", aggregation="tokens", clip_range_high=0.28
        ),
        "gspo": Parts(
            kind="group_std",
            beta=0.0,
            importance_weight="sequence_mean_clip",
            aggregation="sequence_mean",
            clip_range=3e-4,
            clip_range_high=4e-4,
        ),
        "cispo": Parts(
            kind="group_std", beta=0.0, importance_weight="clamp", aggregation="tokens", importance_clamp=5.0
        ),
        "m2po": Parts(kind="group_std", beta=0.0, importance_weight="second_moment", aggregation="tokens"),
        "rloo": Parts(kind="leave_one_out", beta=0.0),
        "proximal_rloo": Parts(kind="leave_one_out", beta=0.0, importance_weight="sequence_clip"),
        "ppo_clip": Parts(kind="batch_std", beta=0.0, importance_weight="token_clip", aggregation="tokens"),
        "reinforce": Parts(kind="batch", beta=0.0),
        "online_dpo": Parts(kind="best_worst", beta=0.1, aggregation="groups"),
        "raft": Parts(kind="best", beta=0.0, aggregation="groups"),
    }
)
"""The built-in names of `objective.preset`; docs/algorithm.md has their formulas and sources."""

FAMILY = tuple(name for name, parts in PRESETS.items() if parts.kind == "trajectory_balance")
BASELINES = tuple(name for name in PRESETS if name not in FAMILY)

DEFAULT_RESET_STEPS = 50


class ObjectiveSection(StrictModel):
    """The objective (docs/algorithm.md). Where a key is None, the preset's value is used."""

    preset: Annotated[
        str,
        AfterValidator(partial(plugins.check_name, what="preset", builtin=tuple(PRESETS))),
        Field(json_schema_extra={"examples": [*PRESETS]}),
    ] = "tba_prime"
    """Name of a preset (table in docs/algorithm.md), or an objective of your own: MODULE:NAME (docs/extending.md)."""
    beta: KlCoefficient = Schedule(value=0.05)
    """KL coefficient. Default: that of the preset; 0 for an objective of your own."""
    anchor: Anchor | None = None
    """Target of the KL. `fixed`: the starting model (default of baselines with beta above 0). `reset`: a copy of theta,
    taken every `reference_reset_steps`. `behaviour`: the policy that sampled the rollout (not for baselines)."""
    importance_clamp: float | None = Field(default=None, gt=0)
    """Upper bound of the importance weight with `clamp` and `mask` (default 8; 5 for `cispo`)."""
    aggregation: Aggregation | None = None
    """Divisor of a token's term in the loss. `rollouts`, `groups`, `tokens`: number of rollouts, of groups, of trained
    tokens of the batch. The others are the number of rollouts times a length. `sequence_mean`: the rollout's trained
    tokens. `whole_sequence_mean`: all its tokens. `constant`: `searcher.max_response_tokens`."""
    mask_truncated: bool = False
    """Leave rollouts that a limit ended (of tokens, or of an episode) out of the gradient, not out of the baseline."""
    mask_tied: bool = False
    """Leave groups whose rewards are all equal out of the gradient, their KL included; they still count in divisors. No
    forward pass is made for them, unless another group reads their log-probs, so a step costs less. Not with
    `reinforce`, which learns from such groups too."""
    old_policy_versions: int = Field(default=4, ge=1)
    """With `tba_prime_published`: number of published versions whose trained weights the trainer keeps as float32
    copies, on its device and in its checkpoints. The oldest rollouts need policy age / `trainer.sync_interval` of them.
    Tokens of older versions keep the sampler's log-probs, and are counted (`old_policy_missing_tokens`)."""
    reference_placement: Literal["trainer", "searcher"] = "trainer"
    """Service that computes ref log-probs. `trainer`: it holds the reference model. `searcher`: searchers send them
    with their rollouts, as in the paper, so the trainer needs no reference model (anchor `fixed` only)."""
    reference_reset_steps: int | None = Field(default=None, ge=1)
    """rho: with the anchor `reset`, number of steps between two resets of the reference to theta (default 50)."""

    @model_validator(mode="before")
    @classmethod
    def _beta_of_the_preset(cls, document: Any) -> Any:
        # before validation, since a default of the field cannot depend on the preset
        if not isinstance(document, dict) or "beta" in document or "preset" not in document:
            return document
        preset = document["preset"]
        if not isinstance(preset, str):
            return document
        return {**document, "beta": Schedule(value=PRESETS[preset].beta if preset in PRESETS else 0.0)}

    @model_validator(mode="after")
    def _check(self) -> ObjectiveSection:
        if self.preset not in FAMILY and self.anchor == "behaviour":
            kind = "the objective" if self.is_custom else "the baseline"
            raise ValueError(
                f'anchor = "behaviour" belongs to the family ({", ".join(FAMILY)}); the KL of {kind} '
                f"{self.preset} is to a reference: fixed or reset"
            )
        if self.preset not in FAMILY and self.anchor is not None and self.used_anchor is None:
            raise ValueError(
                f'anchor = "{self.anchor}" is not used: {self.preset} has beta 0 and so no KL; remove it or raise beta'
            )
        anchor, parts = self.used_anchor, self.parts
        if parts is not None and parts.age_scaled and anchor != "behaviour":
            raise ValueError(
                f"{self.preset} divides the log-ratio to the behaviour policy by the age, but the anchor is {anchor}; "
                'set anchor = "behaviour"'
            )
        # a setting without effect is a misunderstanding: better refused at the start than found after the run
        if anchor != "reset" and self.reference_reset_steps is not None:
            raise ValueError(
                f'reference_reset_steps = {self.reference_reset_steps} belongs to anchor = "reset", but '
                f"{self._anchor_text()}; remove it or choose that anchor"
            )
        if self.reference_placement == "searcher" and anchor != "fixed":
            raise ValueError(
                'reference_placement = "searcher" works with anchor = "fixed" alone, because searchers know only the '
                f'starting model, but {self._anchor_text()}; choose that anchor or reference_placement = "trainer"'
            )
        if self.reference_placement == "searcher" and parts is not None and parts.log_ratio_token_clamp is not None:
            raise ValueError(
                f'reference_placement = "searcher" sends one number per rollout, and {self.preset} clamps the '
                'log-ratio of every token; choose reference_placement = "trainer"'
            )
        # its A_j has the reward in a tied group too; without such groups what is left is not centred
        if self.mask_tied and parts is not None and parts.kind == "batch":
            raise ValueError(
                f"mask_tied = true leaves groups out whose rewards are all equal, and {self.preset} compares rewards "
                "with the batch, so it learns from such groups too; set mask_tied = false"
            )
        self._check_unused()
        return self

    def _check_unused(self) -> None:
        """Refuse a setting that has no effect with this preset."""
        parts = self.parts
        if parts is None:
            # it may read the clamp; its loss is always divided by the number of rollouts
            used = {"aggregation": (False, "a preset"), "old_policy_versions": (False, "tba_prime_published")}
        else:
            used = {
                "importance_clamp": (parts.importance_weight in ("clamp", "mask"), "a clamp or a mask of weights"),
                "old_policy_versions": (parts.old_policy == "trainer", "tba_prime_published"),
            }
        for name, (is_used, needed) in used.items():
            value = getattr(self, name)
            # resolved recipes name every setting, so a default is no choice of a person
            if not is_used and value not in (None, type(self).model_fields[name].default):
                raise ValueError(f"{name} = {value} belongs to {needed}, and {self.preset} has none; remove it")

    def _anchor_text(self) -> str:
        anchor = self.used_anchor
        return f"{self.preset} has no KL here (beta is 0)" if anchor is None else f"the anchor is {anchor}"

    @property
    def is_custom(self) -> bool:
        """Whether the preset is an objective of your own (MODULE:NAME); any setting may matter to it."""
        return self.preset not in PRESETS

    @property
    def parts(self) -> Parts | None:
        """The parts of the preset with the recipe's overrides; None: an objective of your own."""
        if self.is_custom:
            return None
        return replace(PRESETS[self.preset], **self.named_parts)

    @property
    def named_parts(self) -> dict[str, Any]:
        """Name -> value of the parts that the recipe overrides."""
        return {name: value for name in _OVERRIDES if (value := getattr(self, name)) is not None}

    @property
    def used_anchor(self) -> Anchor | None:
        """The target of the KL that is used; None: there is no KL at any step."""
        if (parts := self.parts) is not None and parts.anchor is not None and self.preset in FAMILY:
            return parts.anchor
        # a schedule may begin at 0 and rise: the reference must be there from the first step
        return (self.anchor or "fixed") if self.beta.highest > 0 else None

    @property
    def needs_reference(self) -> bool:
        """Whether the objective uses ref log-probs. A live change of beta must not change this."""
        return self.used_anchor in ("fixed", "reset")

    @property
    def needs_beta(self) -> bool:
        """Whether beta must be above 0 at every step."""
        return self.preset in FAMILY or self.preset == "online_dpo"


_OVERRIDES = ("anchor", "importance_clamp", "aggregation")
"""Names of the parts that are also keys of `[objective]`."""
