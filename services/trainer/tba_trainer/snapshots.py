"""Snapshots: what a weight version consists of, taken between two optimizer steps.

The tensors go to local files as they are gathered, one at a time. The canary is computed from the published tensors in
the published dtype: where that is not what is trained, a second copy of the model holds them.
"""

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
from tba_trainer.logprobs import LogprobModel
from tba_trainer.model import TORCH_DTYPES, frozen_copy
from tba_trainer.packing import pack_sequences
from tba_trainer.parameters import assign, has_adapter, published_tensors
from tba_trainer.tensor_files import TensorFiles, lockstep, write_model_files

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
    paths: tuple[Path, ...]
    """safetensors files with the named parameters in `dtype`, in a folder of their own."""
    canary: Canary

    @property
    def tensors(self) -> TensorFiles:
        """The named parameters."""
        return TensorFiles(self.paths)

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.paths[0].parent, ignore_errors=True)


class Snapshots:
    """Takes snapshots of theta.

    Args:
        model: theta.
        folder: where the files of snapshots lie until they are published.
    """

    def __init__(self, model: Any, recipe: Recipe, *, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._dtype = recipe.model.dtype
        self._max_bytes = recipe.store.shard_bytes
        self._tolerance = max(recipe.trainer.canary_tolerance, MIN_TOLERANCE[self._dtype])
        same = all(p.dtype == TORCH_DTYPES[self._dtype] for p in model.parameters()) and not has_adapter(model)
        self._published = model if same else frozen_copy(model, TORCH_DTYPES[self._dtype])
        self._logprobs = LogprobModel(self._published, temperature=1.0)

    def take(self, version: PolicyVersion, parent: PolicyVersion | None) -> Snapshot:
        """Write the weights as they are now to files.

        Raises:
            OSError: the local disk is full.
        """
        folder = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._folder))
        with closing(lockstep(self._tensors())) as tensors:
            paths = write_model_files(tensors, folder, max_bytes=self._max_bytes)
        return Snapshot(version=version, parent=parent, dtype=self._dtype, paths=tuple(paths), canary=self._canary())

    def follow(self) -> None:
        """What `take` does in the other processes of a sharded model: they have their part in every exchange."""
        for _ in self._tensors():
            pass
        self._canary()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The published tensors; the copy that computes the canary takes them as they pass."""
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
