"""LoRA through peft: an adapter on the linear layers is all that is trained (arXiv 2106.09685).

The model keeps the starting weights, so without its adapter it is the starting model: no second model is needed as
the reference. What is published is merged (`parameters.published_tensors`), so nobody but the trainer knows of LoRA.
"""

from __future__ import annotations

from typing import Any

import torch

from tba.config.lora import LoraSection
from tba.errors import ConfigError
from tba_trainer.parameters import ADAPTER, is_adapted


def add_adapter(model: Any, section: LoraSection) -> None:
    """Put an adapter on a model in place and freeze everything else; until it is trained it adds zero.

    Its first values come from torch's random numbers.

    Raises:
        ConfigError: peft is not installed, or `target_modules` names something else than linear layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError(
            "[model.lora] needs the package peft, which is not installed: pip install -e './services/trainer[lora]'"
        ) from None
    from transformers.pytorch_utils import Conv1D

    layers = _target_layers(model, section.target_modules, (torch.nn.Linear, Conv1D))
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(layers),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),  # gpt2 keeps weights transposed
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)


def _target_layers(model: Any, names: list[str] | None, kinds: tuple[type, ...]) -> dict[str, Any]:
    """The layers that get an adapter, by full name."""
    head = model.get_output_embeddings()
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, kinds) and module is not head
    }
    if names is None:
        return linear
    known = sorted({name.rpartition(".")[2] for name in linear})
    for name in names:
        if name not in known:
            raise ConfigError(
                f"model.lora.target_modules names {name!r}, which is no linear layer of this model before its output "
                f"head; it has {', '.join(known)}"
            )
    return {name: module for name, module in linear.items() if name.rpartition(".")[2] in names}


def remove_adapter(model: Any) -> None:
    """Put the layers without their adapters back in place; nothing is merged."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_adapted(child):
                setattr(module, name, child.base_layer)
