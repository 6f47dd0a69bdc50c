"""The parameters of a torch model as the manifest sees them: digest, and strict in-place replacement from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tba.errors import MalformedError, StoreError
from tba.weights import tensor_header
from tba.wire.manifest import params_digest
from tba_searcher.engines.base import EngineError

DtypeAndShape = tuple[str, list[int]]
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def params_sha256(model: nn.Module) -> str:
    """The manifest's `params_sha256` over `model.named_parameters()` (a tied output embedding counts once)."""
    return params_digest({name: described(tensor) for name, tensor in model.named_parameters()})


def replace_params(model: nn.Module, tensors_paths: Sequence[Path]) -> None:
    """Copy every tensor of safetensors files into the parameter of the same name, one at a time.

    Everything is checked before anything is written. Tied parameters are one tensor, so both ends change.

    Raises:
        EngineError: a file is not readable, or names, shapes or dtypes are not exactly the model's.
    """
    params = dict(model.named_parameters())
    check_tensors(tensors_paths, {name: _dtype_and_shape(param) for name, param in params.items()})
    with torch.no_grad():
        for path in tensors_paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    params[name].copy_(file.get_tensor(name))


def read_headers(tensors_paths: Sequence[Path]) -> dict[str, tuple[Path, DtypeAndShape]]:
    """What safetensors files hold: tensor name -> its file, and dtype and shape as its header names them.

    Raises:
        EngineError: a file is not readable.
    """
    found = {}
    for path in tensors_paths:
        try:
            header = tensor_header(path)
        except (MalformedError, StoreError) as error:
            raise EngineError(f"weights: {error}") from None
        found |= {name: (path, (entry["dtype"], list(entry["shape"]))) for name, entry in header.items()}
    return found


def check_tensors(tensors_paths: Sequence[Path], expected: Mapping[str, DtypeAndShape]) -> dict[str, Path]:
    """The file of each tensor, when the files hold exactly what is expected.

    Raises:
        EngineError: a file is not readable, or names, shapes or dtypes are not exactly those expected.
    """
    places = {}
    for name, (path, found) in read_headers(tensors_paths).items():
        wanted = expected.get(name)
        if wanted is not None and found != wanted:
            raise EngineError(
                f"weights {path}: tensor {name!r} is {found[0]} {found[1]}, the model has {wanted[0]} {wanted[1]}"
            )
        places[name] = path
    odd = sorted(set(expected) ^ set(places))
    if odd:
        where = "missing in the files" if odd[0] in expected else "not a parameter of the model"
        names = ", ".join(str(path) for path in tensors_paths)
        raise EngineError(f"weights {names}: tensor {odd[0]!r} is {where} ({len(odd)} names differ)")
    return places


def described(tensor: Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """A tensor as `params_digest` takes it: dtype, shape, raw bytes."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), raw.numpy().data


def _dtype_and_shape(tensor: Tensor) -> DtypeAndShape:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)
