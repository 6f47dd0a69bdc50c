"""The parameters of a torch model as the manifest sees them: digest, and strict in-place replacement from a file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tba.wire.manifest import params_digest
from tba_searcher.engines.base import EngineError

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def params_sha256(model: nn.Module) -> str:
    """The manifest's `params_sha256` over `model.named_parameters()` (a tied output embedding counts once)."""
    return params_digest({name: _described(tensor) for name, tensor in model.named_parameters()})


def replace_params(model: nn.Module, tensors_path: Path) -> None:
    """Copy every tensor of a safetensors file into the parameter of the same name.

    Everything is checked before anything is written. Tied parameters are one tensor, so both ends change.

    Raises:
        EngineError: the file is not readable, or its names, shapes or dtypes are not exactly the model's.
    """
    params = dict(model.named_parameters())
    try:
        with safe_open(tensors_path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"weights {tensors_path}: not a readable safetensors file ({error})") from None
    odd = sorted(set(params) ^ set(tensors))
    if odd:
        where = "missing in the file" if odd[0] in params else "not a parameter of the model"
        raise EngineError(f"weights {tensors_path}: tensor {odd[0]!r} is {where} ({len(odd)} names differ)")
    for name, tensor in tensors.items():
        param = params[name]
        if tensor.shape != param.shape or tensor.dtype != param.dtype:
            raise EngineError(
                f"weights {tensors_path}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, "
                f"the model has {param.dtype} {list(param.shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            params[name].copy_(tensor)


def _described(tensor: Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), raw.numpy().data
