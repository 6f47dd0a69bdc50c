"""The objective of a run, resolved from the recipe: preset, overrides and settings in one immutable value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tba import plugins
from tba.config import ObjectiveSection
from tba.config.objective import DEFAULT_RESET_STEPS, Anchor, Parts
from tba.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A fully resolved objective. Hashable and free of tensors."""

    name: str
    parts: Parts
    """Formula of the advantage, token weight, divisor and their bounds; not used if there is a `function`."""
    anchor: Anchor | None
    """The policy that the KL pulls towards; None: there is no KL."""
    aggregation_tokens: int
    """Divisor of a rollout's tokens where the aggregation is `constant`."""
    mask_truncated: bool
    mask_tied: bool
    reference_placement: Literal["trainer", "searcher"] | None
    """The service that computes ref log-probs; None: the objective has no reference."""
    reset_steps: int | None
    """The reference becomes theta after every so many steps; None: never."""
    function: Callable[..., Tensor] | None = None
    """An `ObjectiveFunction` (loss.py), which takes the place of formula, weight and divisor."""

    @property
    def importance_clamp(self) -> float:
        """Upper bound of rho for the token weights `clamp` and `mask`."""
        return self.parts.importance_clamp

    @property
    def needs_reference(self) -> bool:
        """Whether ref log-probs are used. If not, no reference is built; `Sequences.ref_log_ratio` means nothing."""
        return self.reference_placement is not None

    @property
    def reads_theta(self) -> bool:
        """Whether A_j depends on theta's log-probs. If not, `Sequences.logprob` may be zeros: no pass is needed."""
        return self.anchor is not None or self.function is not None

    @property
    def needs_complete_groups(self) -> bool:
        """Whether A_j depends on theta's log-probs of the *other* rollouts of its group.

        If true, a group that spans micro-batches needs a first pass. If false although `reads_theta` is true, a
        micro-batch may call `advantages` on the whole batch with only its own rows of `Sequences.logprob` filled in,
        and take its own rows of the result.
        """
        alone = self.parts.kind == "trajectory_balance" and self.parts.centre == "none"
        return self.needs_all_tokens or (self.reads_theta and (self.function is not None or not alone))

    @property
    def needs_complete_batch(self) -> bool:
        """Whether a rollout's gradient depends on rollouts of *other* groups: the whole batch is then taken at once."""
        return self.function is not None or self.needs_all_tokens or self.parts.kind in ("batch", "batch_std")

    @property
    def needs_all_tokens(self) -> bool:
        """Whether a token's weight depends on theta's log-probs of all tokens of the batch."""
        return self.function is None and self.parts.importance_weight == "second_moment"

    @property
    def clamps_tokens(self) -> bool:
        """Whether log-ratios to the reference are clamped token by token: its log-probs are needed per token."""
        return self.needs_reference and self.parts.log_ratio_token_clamp is not None


def resolve(section: ObjectiveSection, *, max_response_tokens: int | None = None) -> Objective:
    """Return the objective that the recipe's section describes.

    Args:
        section: `[objective]` of the recipe.
        max_response_tokens: the recipe's `searcher.max_response_tokens`, the divisor of the aggregation `constant`.

    Raises:
        ConfigError: the preset is a user's own objective that cannot be imported, or the aggregation is `constant` and
            `max_response_tokens` is None.
    """
    parts, anchor, function = section.parts, section.used_anchor, None
    if parts is None:
        parts = Parts(**section.named_parts)
        function = plugins.load(section.preset, what="objective.preset")
    if max_response_tokens is None and parts.aggregation == "constant":
        raise ConfigError('objective.aggregation = "constant" divides by searcher.max_response_tokens; give it')
    return Objective(
        name=section.preset,
        parts=parts,
        anchor=anchor,
        aggregation_tokens=max_response_tokens or 1,
        mask_truncated=section.mask_truncated,
        mask_tied=section.mask_tied,
        reference_placement=section.reference_placement if section.needs_reference else None,
        reset_steps=(section.reference_reset_steps or DEFAULT_RESET_STEPS) if anchor == "reset" else None,
        function=function,
    )
