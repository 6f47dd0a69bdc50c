"""The objective's section, and the table of names that `objective.preset` may have (docs/algorithm.md).

It is not in the trainer, because every service reads it: a searcher must know whether it computes ref log-probs, and
the buffer whether a live change of beta is possible. The formulas are in tba_trainer.objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tba import plugins
from tba.config.schedules import KlCoefficient, Schedule
from tba.fields import StrictModel

Anchor = Literal["fixed", "reset", "ema", "behaviour"]
Centre = Literal["theta", "behaviour", "none"]
ImportanceWeight = Literal["none", "clamp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of the family of Trajectory Balance objectives."""

    anchor: Anchor
    centre: Centre
    importance_weight: ImportanceWeight = "none"
    length_normalise: bool = False
    age_scaled: bool = False


MEMBERS = MappingProxyType(
    {
        "tb": Member(anchor="fixed", centre="theta"),
        "tba_prime": Member(anchor="reset", centre="behaviour", importance_weight="clamp"),
        "tba_prime_unweighted": Member(anchor="reset", centre="behaviour"),
        "kimi": Member(anchor="behaviour", centre="none"),
        "tb_behaviour": Member(anchor="behaviour", centre="theta", age_scaled=True),
    }
)
"""The family by name (arXiv 2503.18929 Eq. 5; its TBA' experiments; Kimi k1.5, arXiv 2501.12599)."""

BASELINE_BETAS = MappingProxyType(
    {
        "grpo": 0.0,
        "dr_grpo": 0.0,
        "rloo": 0.0,
        "proximal_rloo": 0.0,
        "ppo_clip": 0.0,
        "reinforce": 0.0,
        "online_dpo": 0.1,
    }
)
"""The baselines by name, with the beta that each has unless the recipe says otherwise."""

PRESETS = (*MEMBERS, *BASELINE_BETAS)
"""The built-in names of `objective.preset`."""

FORMER_DEFAULTS = MappingProxyType({"reference_reset_steps": 50})
"""Defaults of older releases. Resolved recipes in their run folders hold them with any anchor, where they have no
effect."""

CLIPPED = ("grpo", "ppo_clip", "proximal_rloo")
"""The baselines whose ratio to the behaviour policy is clipped."""

DEFAULT_RESET_STEPS, DEFAULT_EMA_DECAY, DEFAULT_EMA_EVERY_STEPS = 50, 0.9, 10


def _known_preset(preset: str) -> str:
    plugins.resolve(preset, group="tba.objectives", what="preset", builtin=PRESETS)
    return preset


class ObjectiveSection(StrictModel):
    """The objective (docs/algorithm.md)."""

    preset: Annotated[str, AfterValidator(_known_preset), Field(json_schema_extra={"examples": [*PRESETS]})] = (
        "tba_prime"
    )
    """A member of the family (MEMBERS), a baseline (BASELINE_BETAS), or an objective of your own: MODULE:NAME, or an
    entry point of the group `tba.objectives` (docs/extending.md). The default is the one that held at a lag of 16
    steps, where the others fell behind (docs/results.md)."""
    beta: KlCoefficient = Schedule(value=0.05)
    """KL coefficient. Default: 0.05 in the family, 0 for all others (no KL), but 0.1 for `online_dpo`."""
    anchor: Anchor | None = None
    """The target of the KL: the starting model (`fixed`), theta as it was every `reference_reset_steps`
    (`reset`), a moving average of theta (`ema`), or the policy that sampled the rollout (`behaviour`; not for a
    baseline). None: as the preset says; `fixed` for a baseline whose beta is above 0."""
    centre: Centre | None = None
    """The term that is subtracted from a rollout's log-ratio: the group mean under theta, the group mean under the
    behaviour policy (up to `centre_max_age_steps`), or nothing. Family only. None: as the preset says."""
    importance_weight: ImportanceWeight | None = None
    """Token weight: none, or clamp(pi_theta / pi_behaviour, 0, `importance_clamp`). Family only. None: as the preset
    says."""
    length_normalise: bool | None = None
    """Divide every sequence's log-probs by its number of tokens. Family only. None: as the preset says."""
    age_scaled: bool | None = None
    """With the anchor `behaviour`: clamp the log-ratio to +-`log_ratio_clamp` and divide it by the policy age (at
    least 1). Family only. None: as the preset says."""
    importance_clamp: float = Field(default=8.0, gt=0)
    """Upper clamp of the token importance weight, where the objective has one (`dr_grpo` too)."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """Clip of the ratio pi_theta / pi_behaviour in `grpo`, `ppo_clip` (per token) and `proximal_rloo` (per rollout)."""
    log_ratio_clamp: float = Field(default=10.0, gt=0)
    """Clamp of the sequence log-ratio to the behaviour policy, in nats, where it is scaled by age."""
    centre_max_age_steps: int = Field(default=32, ge=0)
    """Behaviour centring applies to rollouts up to this policy age; beyond it the centre is theta."""
    reference_placement: Literal["trainer", "searcher"] = "trainer"
    """The service that computes ref log-probs: `trainer`, which holds the reference model, or `searcher`: the searchers
    send them with their rollouts (the paper's way: no reference model in the trainer; anchor `fixed` only)."""
    reference_reset_steps: int | None = Field(default=None, ge=1)
    """rho: with the anchor `reset`, the steps between two resets of the reference to theta (default 50)."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """With the anchor `ema`: reference = decay * reference + (1 - decay) * theta at every update (default 0.9)."""
    ema_every_steps: int | None = Field(default=None, ge=1)
    """With the anchor `ema`: steps between updates (default 10). Every update makes all ref log-probs stale."""

    @model_validator(mode="before")
    @classmethod
    def _beta_of_the_preset(cls, document: Any) -> Any:
        # before validation, since a default of the field cannot depend on the preset
        if not isinstance(document, dict) or "beta" in document or "preset" not in document:
            return document
        preset = document["preset"]
        if not isinstance(preset, str) or preset in MEMBERS:
            return document
        return {**document, "beta": Schedule(value=BASELINE_BETAS.get(preset, 0.0))}

    @model_validator(mode="after")
    def _check(self) -> ObjectiveSection:
        self._check_family_only()
        anchor = self.used_anchor
        if self.member is not None and self.member.age_scaled and anchor != "behaviour":
            raise ValueError(
                f"age_scaled scales the log-ratio to the behaviour policy, but the anchor is {anchor}; set "
                'anchor = "behaviour" or age_scaled = false'
            )
        settings = {"reference_reset_steps": "reset", "ema_decay": "ema", "ema_every_steps": "ema"}
        for name, needed in settings.items():
            # a setting without effect is a misunderstanding: better refused at the start than found after the run
            if anchor != needed and getattr(self, name) not in (None, FORMER_DEFAULTS.get(name)):
                raise ValueError(
                    f'{name} = {getattr(self, name)} belongs to anchor = "{needed}", but {self._anchor_text()}; '
                    "remove it or choose that anchor"
                )
        if self.reference_placement == "searcher" and anchor != "fixed":
            raise ValueError(
                'reference_placement = "searcher" works with anchor = "fixed" alone, because searchers know only the '
                f'starting model, but {self._anchor_text()}; choose that anchor or reference_placement = "trainer"'
            )
        self._check_unused()
        return self

    def _check_unused(self) -> None:
        """Refuse a setting that nothing here uses."""
        member = self.member
        clamps = self.preset == "dr_grpo" if member is None else member.importance_weight == "clamp"
        used = {
            "importance_clamp": (clamps, 'importance_weight = "clamp", or dr_grpo'),
            "clip_range": (self.preset in CLIPPED, f"a clip ({', '.join(CLIPPED)})"),
            "log_ratio_clamp": (member is not None and member.age_scaled, "age_scaled = true"),
            "centre_max_age_steps": (member is not None and member.centre == "behaviour", 'centre = "behaviour"'),
        }
        for name, (is_used, needed) in used.items():
            value = getattr(self, name)
            # resolved recipes name every setting, so a default is no choice of a person
            if not is_used and not self.is_custom and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {value:g} belongs to {needed}, and {self.preset} does not have it here; remove it"
                )

    def _check_family_only(self) -> None:
        if self.preset in MEMBERS:
            return
        for name in ("centre", "importance_weight", "length_normalise", "age_scaled"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} belongs to the family ({', '.join(MEMBERS)}); {self._kind} "
                    f"{self.preset} does not have this setting: remove it"
                )
        if self.anchor == "behaviour":
            raise ValueError(
                f'anchor = "behaviour" belongs to the family ({", ".join(MEMBERS)}); the KL of {self._kind} '
                f"{self.preset} is to a reference: fixed, reset or ema"
            )
        if self.anchor is not None and self.used_anchor is None:
            raise ValueError(
                f'anchor = "{self.anchor}" is not used: {self.preset} has beta 0 and so no KL; remove it or raise beta'
            )

    def _anchor_text(self) -> str:
        anchor = self.used_anchor
        return f"{self.preset} has no KL here (beta is 0)" if anchor is None else f"the anchor is {anchor}"

    @property
    def is_custom(self) -> bool:
        """Whether the preset is an objective of your own. What it reads is not known here: every setting may matter."""
        return self.preset not in PRESETS

    @property
    def _kind(self) -> str:
        return "the objective" if self.is_custom else "the baseline"

    @property
    def member(self) -> Member | None:
        """The member of the family: the preset with what the recipe overrides. None: another objective."""
        if self.preset not in MEMBERS:
            return None
        preset = MEMBERS[self.preset]
        return Member(
            anchor=self.anchor or preset.anchor,
            centre=self.centre or preset.centre,
            importance_weight=self.importance_weight or preset.importance_weight,
            length_normalise=preset.length_normalise if self.length_normalise is None else self.length_normalise,
            age_scaled=preset.age_scaled if self.age_scaled is None else self.age_scaled,
        )

    @property
    def used_anchor(self) -> Anchor | None:
        """The target of the KL; None: there is no KL at any step."""
        if (member := self.member) is not None:
            return member.anchor
        # a schedule may begin at 0 and rise: the reference must be there from the first step
        return (self.anchor or "fixed") if self.beta.highest > 0 else None

    @property
    def needs_reference(self) -> bool:
        """Whether ref log-probs enter the objective. A live change of beta must leave this as it is."""
        return self.used_anchor in ("fixed", "reset", "ema")

    @property
    def takes_behaviour_for_theta(self) -> Literal["anchor", "centre"] | None:
        """The part that takes the behaviour policy for an earlier theta, which is right only at the policy
        temperature."""
        if (member := self.member) is None:
            return None
        return "anchor" if member.anchor == "behaviour" else "centre" if member.centre == "behaviour" else None

    @property
    def needs_beta(self) -> bool:
        """Whether a beta of 0 has no meaning."""
        return self.preset in MEMBERS or self.preset == "online_dpo"

    def check_steps(self, num_steps: int) -> None:
        """Refuse a beta of 0 where it has no meaning.

        Args:
            num_steps: optimizer steps of the run.

        Raises:
            ValueError: one sentence.
        """
        if self.needs_beta and self.beta.lowest(num_steps) <= 0:
            raise ValueError(
                f"objective.beta is 0 at some step of the run's {num_steps}, and {self.preset} needs it above 0 "
                "at every step (its optimum is pi_ref exp(r / beta)); raise beta, or its `final`, or choose a baseline "
                "without KL such as dr_grpo"
            )
