"""What a checkpoint holds beside tensors: state.json."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from tba.config.lora import LoraSection
from tba_trainer.guards import GuardState


class TrainerState(BaseModel):
    """state.json. Schedules are functions of the step, so the step is their position; so is the place in the ledger.

    A part that a checkpoint lacks, because an older build wrote it, has its default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    run: str
    version: str
    train_s: float
    num_rollouts_trained: int
    reference_version: str
    rng: dict[str, Any]
    torch_rng: str
    config_sha256: str
    model_config_sha256: str
    policy_temperature: float
    lora: LoraSection | None = None
    guards: GuardState = GuardState()
    """What the guards remember."""
    previous: str | None = None
    """Version of the checkpoint before this one; null: this is the first one of the run."""
    settings_revision: int = 0
    """Revision of the live settings that the version was trained with; 0: the recipe's values."""


def encode_torch_rng() -> str:
    """torch's random state as base64 text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def decode_torch_rng(text: str) -> Tensor:
    """The opposite of `encode_torch_rng`."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
