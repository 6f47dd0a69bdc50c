"""A causal language model from a folder in Hugging Face format, frozen and ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tba.errors import ConfigError


def load_model(folder: Path, *, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """The model in eval mode, without gradients.

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
