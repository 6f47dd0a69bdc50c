"""Weights into a running vLLM, and a digest of exactly what went in.

This class is mixed into vLLM's worker (`worker_extension_cls`), where the model is. vLLM's own `reload_weights` does
the work: it knows how names map onto its packed layers. Two things are added.

* Every tensor is hashed as it is handed over, in the order of `params_digest`.
* On the CPU, an output head keeps a packed copy of its weights. vLLM renews the copy when the head's own weights are
  loaded, but a head that is tied to the input embedding has none, and would go on with the old ones, silently.
"""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from tba.wire.manifest import add_param
from tba_searcher.engines.params import described

WORKER_EXTENSION = f"{__name__}.WeightsExtension"


class Feed:
    """All tensors of safetensors files in the order of their names, each hashed when it is taken.

    Args:
        places: tensor name -> file.
    """

    def __init__(self, places: dict[str, str]) -> None:
        self._places, self._digest, self.num_fed = places, hashlib.sha256(), 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        files: dict[str, Any] = {}
        for name in sorted(self._places):
            path = self._places[name]
            file = files.get(path) or files.setdefault(path, safe_open(Path(path), framework="pt"))
            tensor = file.get_tensor(name)
            add_param(self._digest, name, *described(tensor))
            self.num_fed += 1
            yield name, tensor

    @property
    def sha256(self) -> str:
        """`params_digest` of what was taken."""
        return self._digest.hexdigest()


class WeightsExtension:
    """Methods that vLLM's worker gets; called through `collective_rpc`, so arguments and results are plain values."""

    model_runner: Any
    """vLLM's."""

    def tba_load_weights(self, places: dict[str, str]) -> str:
        """Replace all parameters by the tensors of files (name -> file); the digest of what was loaded.

        Raises:
            RuntimeError: vLLM did not take every tensor.
            Exception: what reading or vLLM raises. The weights are then a mixture, but a next load starts afresh.
        """
        feed = Feed(places)
        try:
            self.model_runner.reload_weights(weights_iterator=iter(feed))
        except BaseException:
            self._end_half_load()
            raise
        if feed.num_fed != len(places):
            raise RuntimeError(f"vLLM took {feed.num_fed} of {len(places)} tensors")
        self._renew_output_heads()
        return feed.sha256

    def _end_half_load(self) -> None:
        """Make vLLM forget the tensors of a load that broke off; a next load would mix them in."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)

    def _renew_output_heads(self) -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
