"""Torch models: load one from a folder, and replace its parameters in place from safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tba.errors import ConfigError
from tba.model_folders import check_load_report
from tba_searcher.engines.weight_check import check_tensors, dtype_name, file_stamps


def load_model(folder: Path, *, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """Load a causal language model in Hugging Face format, in eval mode and without gradients.

    Raises:
        ConfigError: the folder holds no usable causal language model, or not all of its weights.
    """
    disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,  # never a pickle: loading one runs its code
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        has_parts = "Unrecognized configuration class" in first_line
        hint = "; if text is a part of what it does, save its text model by itself" if has_parts else ""
        raise ConfigError(f"model folder {folder} holds no usable causal language model: {first_line}{hint}") from None
    check_load_report(report, model, where=f"model folder {folder}")
    model.to(torch.device(device))
    return model.eval().requires_grad_(False)


class StagedParams:
    """A copy of the tensors of safetensors files in memory, to become the parameters of a model."""

    def __init__(self, model: nn.Module, tensors_paths: Sequence[Path]) -> None:
        expected = {name: (dtype_name(param), list(param.shape)) for name, param in model.named_parameters()}
        check_tensors(tensors_paths, expected)
        self.stamps = file_stamps(tensors_paths)
        # copies: the tensors of `safe_open` are read from the file when they are used; a GPU reads pinned ones faster
        pins = next(model.parameters()).device.type == "cuda"
        self._tensors: dict[str, Tensor] = {}
        for path in tensors_paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    tensor = file.get_tensor(name)
                    self._tensors[name] = tensor.pin_memory() if pins else tensor.clone()

    def put_into(self, model: nn.Module) -> None:
        """Replace the model's parameters with these tensors; a model on the CPU takes them without a copy."""
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.device.type == "cpu":
                    param.data = self._tensors[name]
                else:  # a GPU may have no room for two
                    param.copy_(self._tensors[name])
