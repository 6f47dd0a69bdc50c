"""Weights for a running vLLM: read and hashed on their way in, and prepared beside generation.

vLLM's own reload does the work, because it knows how names map onto its packed layers.

    CPU   SecondModel: the next weights go into a second model, and the pause is an exchange of the two. vLLM's kernels
          keep their own packed form of a weight, and packing takes several times as long as a copy.
    GPU   HostTensors: the next weights are hashed in pinned memory of the host, and the pause is vLLM's reload from it.
"""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from tba.weights.digest import in_parallel
from tba.wire.weight_manifest import table_sha256
from tba_searcher.engines.weight_check import FileStamps, table_entry

Paths = Mapping[str, str]
"""Tensor name -> its safetensors file."""
Loaded = tuple[FileStamps | None, str]
"""The files that are in a model (None: unknown, a load broke off), and the `params_sha256` of their tensors."""


class HashedTensors:
    """Iterates over the tensors of safetensors files by name, and hashes each."""

    def __init__(self, paths: Paths) -> None:
        self._paths, self._entries = paths, list[tuple[str, str, tuple[int, ...], str]]()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors(self._paths):
            self._entries.append(table_entry(name, tensor))
            yield name, tensor

    @property
    def sha256(self) -> str:
        """The `params_sha256` of the tensors that were taken."""
        return table_sha256(self._entries)

    @property
    def num_taken(self) -> int:
        """How many tensors were taken."""
        return len(self._entries)


def read_tensors(paths: Paths) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, sorted by name; they are views of the mapped files."""
    files: dict[str, Any] = {}
    for name in sorted(paths):
        path = paths[name]
        file = files.get(path) or files.setdefault(path, safe_open(Path(path), framework="pt"))
        yield name, file.get_tensor(name)


def load_files(config: Any, model: Any, paths: Paths) -> str:
    """Replace all parameters of one of vLLM's models by the tensors of files; return their `params_sha256`.

    Args:
        config: vLLM's.

    Raises:
        RuntimeError: vLLM did not take every tensor.
        Exception: reading failed, or vLLM did. The weights are then a mixture; the next load replaces them all.
    """
    tensors = HashedTensors(paths)
    load_tensors(config, model, tensors)
    if tensors.num_taken != len(paths):
        raise RuntimeError(f"vLLM took {tensors.num_taken} of {len(paths)} tensors")
    return tensors.sha256


def load_tensors(config: Any, model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all parameters of one of vLLM's models by named tensors (see `load_files`)."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    try:
        reload_weights(config, model, weights_iterator=iter(tensors), weights_path=None, is_checkpoint_format=True)
    except BaseException:
        # vLLM keeps the tensors of a load that failed, and the next load would mix them in
        finalize_layerwise_reload(model, config.model_config)
        raise
    _renew_output_heads(model)


def _renew_output_heads(model: Any) -> None:
    """Renew the packed copy of the weights that an output head keeps on the CPU."""
    # vLLM renews it when the head's own weights are loaded. A head that is tied to the input embedding has none,
    # and would silently use the old weights.
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class Staging(Protocol):
    """Weights that are prepared in one thread, and used in another."""

    def stage(self, paths: Paths, stamps: FileStamps) -> None:
        """Prepare the tensors of files; forget what was prepared before."""
        ...

    def use(self, stamps: FileStamps, before: Loaded) -> str | None:
        """Put the prepared weights into use and return their `params_sha256`; None: others are prepared, or none.

        Args:
            stamps: of the files that are wanted.
            before: what is in use now.
        """
        ...


class SecondModel:
    """A second model with its own weights; the layers that hold keys and values are found by name, in the first one.

    The model that was in use is the second one afterwards, so that going back costs nothing either.

    Raises:
        RuntimeError: this model cannot be exchanged.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._model = runner, _make_second(runner)
        self._holds: Loaded = (None, "")
        self._lock = threading.Lock()

    def stage(self, paths: Paths, stamps: FileStamps) -> None:
        """See `Staging`."""
        import torch

        with self._lock, torch.no_grad():
            self._holds = (None, "")
            self._holds = (stamps, load_files(self._runner.vllm_config, self._model, paths))

    def use(self, stamps: FileStamps, before: Loaded) -> str | None:
        """See `Staging`."""
        if not self._lock.acquire(blocking=False):  # another version is being prepared
            return None
        try:
            if self._holds[0] != stamps:
                return None
            (_, sha256), self._holds = self._holds, before
            self._runner.model, self._model = self._model, self._runner.model
            return sha256
        finally:
            self._lock.release()


def _make_second(runner: Any) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import get_model

    config = copy.copy(runner.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    # the first model's layers are in here by name, and stay there
    config.compilation_config.static_forward_context = {}
    # models share these layers, and a reload takes them apart for a moment
    shared = rotary_embedding._ROPE_DICT
    known = dict(shared)
    shared.clear()
    try:
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
    finally:
        shared.clear()
        shared.update(known)
    if {*map(id, model.modules())} & {*map(id, runner.model.modules())}:
        raise RuntimeError("it shares layers with every other model")
    by_name = config.compilation_config.static_forward_context.values()
    if any(True for layer in by_name for _ in layer.parameters()):
        raise RuntimeError("vLLM finds layers with weights by their names")
    return model


class HostTensors:
    """All tensors in memory of the host, pinned where there is a GPU."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._staged: tuple[FileStamps, list[tuple[str, Tensor]], str] | None = None

    def stage(self, paths: Paths, stamps: FileStamps) -> None:
        """See `Staging`."""
        import torch

        self._staged = None
        on_gpu = torch.cuda.is_available()
        tensors = [(name, tensor.pin_memory() if on_gpu else tensor.clone()) for name, tensor in read_tensors(paths)]
        sha256 = table_sha256(in_parallel(lambda item: table_entry(*item), tensors))
        self._staged = (stamps, tensors, sha256)

    def use(self, stamps: FileStamps, before: Loaded) -> str | None:
        """See `Staging`."""
        staged = self._staged
        if staged is None or staged[0] != stamps:
            return None
        self._staged = None
        load_tensors(self._runner.vllm_config, self._runner.get_model(), staged[1])
        return staged[2]
