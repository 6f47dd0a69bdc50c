"""Snapshots: what a weight version consists of, taken between two optimizer steps.

The canary is computed from the published tensors in the published dtype: where that is not the training dtype, a
second copy of the model holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.config import Recipe
from tba.versions import PolicyVersion
from tba.wire import Canary
from tba_trainer.logprobs import LogprobModel
from tba_trainer.microbatch import pad_sequences
from tba_trainer.model import TORCH_DTYPES, frozen_copy, load_tensors, snapshot

_CANARY_PROMPT_TOKENS = 8
_CANARY_RESPONSE_TOKENS = 8
_CANARY_SEED = 0
MIN_TOLERANCE = MappingProxyType({"float32": 0.0, "float16": 0.03, "bfloat16": 0.25})
"""Nats. Trainer and engine round differently: a logit of size 8 to 16 is exact to 2^-8 in float16 and to 2^-5 in
bfloat16, and a few such roundings meet. The exact check is `params_sha256`; the canary finds an engine that computes
another model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """One version as it will be published."""

    version: PolicyVersion
    parent: PolicyVersion | None
    dtype: str
    tensors: dict[str, Tensor]
    """Named parameters on the CPU in `dtype`."""
    canary: Canary


class Snapshots:
    """Takes snapshots of theta.

    Args:
        model: theta.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self._model = model
        self._dtype = recipe.model.dtype
        self._tolerance = max(recipe.trainer.canary_tolerance, MIN_TOLERANCE[self._dtype])
        same = all(p.dtype == TORCH_DTYPES[self._dtype] for p in model.parameters())
        self._published = model if same else frozen_copy(model, TORCH_DTYPES[self._dtype])
        self._logprobs = LogprobModel(self._published, temperature=1.0)

    def take(self, version: PolicyVersion, parent: PolicyVersion | None) -> Snapshot:
        """Copy the weights as they are now."""
        tensors = self._refresh()
        return Snapshot(version=version, parent=parent, dtype=self._dtype, tensors=tensors, canary=self._canary())

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights as they are now in Hugging Face format (config and safetensors, no tokenizer)."""
        self._refresh()
        self._published.save_pretrained(folder)

    def _refresh(self) -> dict[str, Tensor]:
        tensors = snapshot(self._model, TORCH_DTYPES[self._dtype])
        if self._published is not self._model:
            load_tensors(self._published, tensors, what="snapshot")
        return tensors

    @torch.no_grad()
    def _canary(self) -> Canary:
        vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        tokens = np.random.default_rng(_CANARY_SEED).integers(
            0, vocab_size, _CANARY_PROMPT_TOKENS + _CANARY_RESPONSE_TOKENS, dtype=np.int32
        )
        prompt, response = tokens[:_CANARY_PROMPT_TOKENS], tokens[_CANARY_PROMPT_TOKENS:]
        sequences = pad_sequences([prompt], [response], self._logprobs.device)
        return Canary(
            prompt_tokens=prompt.tolist(),
            response_tokens=response.tolist(),
            logprobs=self._logprobs.token_logprobs(sequences)[0].tolist(),
            tolerance=self._tolerance,
        )
