"""Loads weights into a running vLLM, and computes a digest of exactly the tensors that were loaded.

`WeightsExtension` is mixed into vLLM's worker (`worker_extension_cls`), where the model is. vLLM's own `reload_weights`
does the work, because it knows how names map onto its packed layers.
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

from tba.wire.weight_manifest import add_param
from tba_searcher.engines.weight_check import digest_entry

WORKER_EXTENSION = f"{__name__}.WeightsExtension"


class HashedTensors:
    """Iterates over the tensors of safetensors files by name, and hashes each in the order of `params_digest`.

    Args:
        paths: tensor name -> file.
    """

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths, self._digest, self.num_taken = paths, hashlib.sha256(), 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        files: dict[str, Any] = {}
        for name in sorted(self._paths):
            path = self._paths[name]
            file = files.get(path) or files.setdefault(path, safe_open(Path(path), framework="pt"))
            tensor = file.get_tensor(name)
            add_param(self._digest, name, *digest_entry(tensor))
            self.num_taken += 1
            yield name, tensor

    @property
    def sha256(self) -> str:
        """The `params_digest` of the tensors that were taken."""
        return self._digest.hexdigest()


class WeightsExtension:
    """Methods for vLLM's worker; `collective_rpc` calls them, so arguments and results are plain values."""

    model_runner: Any
    """vLLM's."""

    def tba_load_weights(self, paths: dict[str, str]) -> str:
        """Replace all parameters by the tensors of files (name -> file); return the digest of the loaded tensors.

        Raises:
            RuntimeError: vLLM did not take every tensor.
            Exception: reading failed, or vLLM did. The weights are then a mixture; the next load replaces them all.
        """
        tensors = HashedTensors(paths)
        try:
            self.model_runner.reload_weights(weights_iterator=iter(tensors))
        except BaseException:
            self._discard_partial_load()
            raise
        if tensors.num_taken != len(paths):
            raise RuntimeError(f"vLLM took {tensors.num_taken} of {len(paths)} tensors")
        self._renew_output_heads()
        return tensors.sha256

    def _discard_partial_load(self) -> None:
        """Make vLLM forget the tensors of a load that failed; the next load would mix them in."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)

    def _renew_output_heads(self) -> None:
        """Renew the packed copy of the weights that an output head keeps on the CPU."""
        # vLLM renews it when the head's own weights are loaded. A head that is tied to the input embedding has none,
        # and would silently use the old weights.
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
