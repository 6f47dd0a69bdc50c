"""LoRA: low-rank adapters instead of full fine-tuning."""

from __future__ import annotations

from pydantic import Field, field_validator

from tba.config.base import StrictModel


class LoraSection(StrictModel):
    """Train an adapter of low rank on the linear layers and leave the model's own weights as they are (arXiv
    2106.09685). Published versions are merged, so searchers and the export see a plain model. Constant within a run."""

    rank: int = Field(default=16, ge=1)
    """Rank of every adapter."""
    alpha: int = Field(default=32, ge=1)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: list[str] | None = Field(default=None, min_length=1)
    """Last parts of the names of the layers that get an adapter, for example `["q_proj", "v_proj"]`; none: every linear
    layer but the output head."""
    dropout: float = 0.0
    """Only 0: the log-probs of the trainer must be those of the policy that samples."""

    @field_validator("dropout")
    @classmethod
    def _check_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError("it must be 0: the log-probs of the trainer must be those of the policy that samples")
        return value
