"""Snapshots of the weights between two optimizer steps: the tensor files and the canary of a version to publish."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
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
from tba_trainer.checkpoints.tensor_files import TensorFiles, lockstep, write_model_files
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.parameters import assign, has_adapter, published_tensors
from tba_trainer.model.policy import TORCH_DTYPES, frozen_copy

_CANARY_PROMPT_TOKENS = 8
_CANARY_RESPONSE_TOKENS = 8
_CANARY_SEED = 0
MIN_TOLERANCE = MappingProxyType({"float32": 0.0, "float16": 0.03, "bfloat16": 0.25})
"""Smallest tolerance of canaries, in nats. Trainer and engine round differently: a logit of size 8 to 16 is exact to
2^-8 in float16 and to 2^-5 in bfloat16, and a few such roundings meet. The exact check is `params_sha256`; the canary
finds an engine that computes another model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightSnapshot:
    """The weights of one version, ready to be published."""

    version: PolicyVersion
    parent: PolicyVersion | None
    dtype: str
    paths: tuple[Path, ...]
    """safetensors files with the named parameters in `dtype`, in their own folder."""
    canary: Canary

    @property
    def tensors(self) -> TensorFiles:
        """The named parameters."""
        return TensorFiles(self.paths)

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.paths[0].parent, ignore_errors=True)


class SnapshotWriter:
    """Takes snapshots of theta.

    Args:
        model: theta.
        folder: for the files of snapshots until they are published.
    """

    def __init__(self, model: Any, recipe: Recipe, *, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._dtype = recipe.model.dtype
        self._max_bytes = recipe.store.shard_bytes
        self._tolerance = max(recipe.trainer.canary_tolerance, MIN_TOLERANCE[self._dtype])
        # the canary is computed from the published tensors in the published dtype: where theta differs (another dtype,
        # an adapter that is not merged), a second copy of the model holds them
        same = all(p.dtype == TORCH_DTYPES[self._dtype] for p in model.parameters()) and not has_adapter(model)
        self._published = model if same else frozen_copy(model, TORCH_DTYPES[self._dtype])
        self._logprobs = LogprobModel(self._published, temperature=1.0)

    def take(self, version: PolicyVersion, parent: PolicyVersion | None) -> WeightSnapshot:
        """Write the current weights to files.

        Raises:
            OSError: the local disk is full.
        """
        folder = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._folder))
        with closing(lockstep(self._tensors())) as tensors:
            paths = write_model_files(tensors, folder, max_bytes=self._max_bytes)
        return WeightSnapshot(
            version=version, parent=parent, dtype=self._dtype, paths=tuple(paths), canary=self._canary()
        )

    def follow(self) -> None:
        """Take part in the exchanges of the leader's `take`, in the other processes of a sharded model."""
        for _ in self._tensors():
            pass
        self._canary()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors, gathered one at a time; copy each into the canary's model on its way."""
        copies = {} if self._published is self._model else dict(self._published.named_parameters())
        for name, tensor in published_tensors(self._model, TORCH_DTYPES[self._dtype]):
            if copies:
                assign(copies[name], tensor)
            yield name, tensor

    @torch.no_grad()
    def _canary(self) -> Canary:
        vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        tokens = np.random.default_rng(_CANARY_SEED).integers(
            0, vocab_size, _CANARY_PROMPT_TOKENS + _CANARY_RESPONSE_TOKENS, dtype=np.int32
        )
        prompt, response = tokens[:_CANARY_PROMPT_TOKENS], tokens[_CANARY_PROMPT_TOKENS:]
        sequences = pack_sequences([prompt], [response], self._logprobs.device)
        return Canary(
            prompt_tokens=prompt.tolist(),
            response_tokens=response.tolist(),
            logprobs=self._logprobs.token_logprobs(sequences).tolist(),
            tolerance=self._tolerance,
        )
