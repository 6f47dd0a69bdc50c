"""The policy as a Hugging Face model with float32 master weights, and its named parameters as plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tba.config.sections import ModelSection
from tba.errors import ConfigError, TbaError
from tba.model_folder import check_tokenizer

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIDE_FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Config and tokenizer files; weights are .safetensors, and nothing else is taken along."""


def load_policy(section: ModelSection, *, device: str, gradient_checkpointing: bool) -> Any:
    """The starting model in float32 on `device`, dropout off.

    Raises:
        ConfigError: the folder is missing or is not a model in Hugging Face format, or the device does not exist.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder = Path(section.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path {section.path!r} holds no model (no config.json); give a folder in Hugging Face format, "
            "or name a task under [model.warm_start] and let `tba run` make the model"
        )
    disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    try:
        model = auto.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.path {section.path!r} cannot be loaded: {first_line}") from None
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"trainer.device {device!r} cannot be used: {first_line}") from None
    without_dropout(model)
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # Hugging Face checkpoints activations in train mode only; dropout is off all the same
    return model


def without_dropout(model: Any) -> None:
    """Set every dropout probability to 0: trainer log-probs must be those of the policy that samples."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def frozen_copy(model: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy without gradients, in eval mode, by default in the same dtype.

    Only parameters take the dtype: buffers such as rotary frequencies stay in float32, as `from_pretrained` and every
    engine keep them.
    """
    twin = copy.deepcopy(model)
    twin.requires_grad_(False)
    twin.eval()
    if dtype is not None:
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(dtype)
    return twin


def snapshot(model: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`named_parameters` (a tied output head appears once) as CPU copies, by default in their own dtype."""
    return {
        name: parameter.detach().to(device="cpu", dtype=dtype or parameter.dtype, copy=True).contiguous()
        for name, parameter in model.named_parameters()
    }


def load_tensors(model: Any, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Copy tensors into the parameters of the same name, converting the dtype.

    Raises:
        TbaError: names or shapes are not those of the model.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        odd = sorted(parameters.keys() ^ tensors.keys())[0]
        raise TbaError(f"{what}: its parameters are not those of the model ({odd!r} is on one side only)")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise TbaError(
                    f"{what}: {name} has shape {list(tensors[name].shape)}, the model has {list(parameter.shape)}"
                )
            parameter.copy_(tensors[name])


def side_files(folder: str | Path, *, trust_remote_code: bool) -> dict[str, Path]:
    """Config and tokenizer files of a model folder by name; Python files only where the recipe trusts them.

    Raises:
        ConfigError: there is no tokenizer.
    """
    check_tokenizer(folder)
    suffixes = (*SIDE_FILE_SUFFIXES, ".py") if trust_remote_code else SIDE_FILE_SUFFIXES
    return {
        path.name: path
        for path in sorted(Path(folder).iterdir())
        if path.is_file() and path.suffix in suffixes and not path.name.endswith(".index.json")
    }
