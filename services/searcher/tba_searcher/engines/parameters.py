"""Parameters of torch models: load a model, digest its parameters, replace them in place from safetensors files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tba.errors import ConfigError, MalformedError, StoreError
from tba.weights import tensor_header
from tba.wire.weight_manifest import params_digest
from tba_searcher.engines.engine import EngineError


def load_model(folder: Path, *, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """Load a causal language model in Hugging Face format, in eval mode and without gradients.

    Args:
        dtype: float32, bfloat16 or float16.
        device: torch device.

    Raises:
        ConfigError: the folder holds no usable causal language model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {folder} holds no usable causal language model: {error}") from None
    model.to(torch.device(device))
    return model.eval().requires_grad_(False)


DtypeAndShape = tuple[str, list[int]]
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def params_sha256(model: nn.Module) -> str:
    """Return the manifest's `params_sha256` over `model.named_parameters()` (a tied output embedding counts once)."""
    return params_digest({name: digest_entry(tensor) for name, tensor in model.named_parameters()})


def replace_params(model: nn.Module, tensors_paths: Sequence[Path]) -> None:
    """Copy every tensor of safetensors files into the parameter of the same name, one at a time.

    Raises:
        EngineError: a file is not readable, or names, shapes or dtypes are not exactly the model's.
    """
    params = dict(model.named_parameters())  # tied parameters are one tensor, so both ends change
    # everything is checked before anything is written
    check_tensors(tensors_paths, {name: _dtype_and_shape(param) for name, param in params.items()})
    with torch.no_grad():
        for path in tensors_paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    params[name].copy_(file.get_tensor(name))


def read_headers(tensors_paths: Sequence[Path]) -> dict[str, tuple[Path, DtypeAndShape]]:
    """Read the headers of safetensors files: tensor name -> its file, and its dtype and shape.

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
    """Check that the files hold exactly the expected tensors; return the file of each tensor.

    Raises:
        EngineError: a file is not readable, or names, shapes or dtypes are not exactly those expected.
    """
    files = {}
    for name, (path, found) in read_headers(tensors_paths).items():
        required = expected.get(name)
        if required is not None and found != required:
            raise EngineError(
                f"weights {path}: tensor {name!r} is {found[0]} {found[1]}, the model has {required[0]} {required[1]}"
            )
        files[name] = path
    differing = sorted(set(expected) ^ set(files))
    if differing:
        where = "missing in the files" if differing[0] in expected else "not a parameter of the model"
        names = ", ".join(str(path) for path in tensors_paths)
        raise EngineError(f"weights {names}: tensor {differing[0]!r} is {where} ({len(differing)} names differ)")
    return files


def digest_entry(tensor: Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """Return a tensor as `params_digest` takes it: dtype, shape, raw bytes."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), raw.numpy().data


def _dtype_and_shape(tensor: Tensor) -> DtypeAndShape:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)
