"""The parameters of a torch model as the manifest sees them: digest, and strict in-place replacement from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tba.errors import MalformedError, StoreError
from tba.weights import tensor_header
from tba.wire.manifest import params_digest
from tba_searcher.engines.base import EngineError

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def params_sha256(model: nn.Module) -> str:
    """The manifest's `params_sha256` over `model.named_parameters()` (a tied output embedding counts once)."""
    return params_digest({name: _described(tensor) for name, tensor in model.named_parameters()})


def replace_params(model: nn.Module, tensors_paths: Sequence[Path]) -> None:
    """Copy every tensor of safetensors files into the parameter of the same name, one at a time.

    Everything is checked before anything is written. Tied parameters are one tensor, so both ends change.

    Raises:
        EngineError: a file is not readable, or names, shapes or dtypes are not exactly the model's.
    """
    params = dict(model.named_parameters())
    places: dict[str, Path] = {}
    for path in tensors_paths:
        try:
            header = tensor_header(path)
        except (MalformedError, StoreError) as error:
            raise EngineError(f"weights: {error}") from None
        for name, entry in header.items():
            places[name] = path
            param = params.get(name)
            found = (entry["dtype"], list(entry["shape"]))
            if param is not None and found != _dtype_and_shape(param):
                raise EngineError(
                    f"weights {path}: tensor {name!r} is {found[0]} {found[1]}, "
                    f"the model has {' '.join(map(str, _dtype_and_shape(param)))}"
                )
    odd = sorted(set(params) ^ set(places))
    if odd:
        where = "missing in the files" if odd[0] in params else "not a parameter of the model"
        names = ", ".join(str(path) for path in tensors_paths)
        raise EngineError(f"weights {names}: tensor {odd[0]!r} is {where} ({len(odd)} names differ)")
    with torch.no_grad():
        for path in tensors_paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    params[name].copy_(file.get_tensor(name))


def _dtype_and_shape(tensor: Tensor) -> tuple[str, list[int]]:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)


def _described(tensor: Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), raw.numpy().data
