"""The policy as a Hugging Face model with float32 master weights, and its named parameters as plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from tba.config.sections import ModelSection
from tba.errors import ConfigError, TbaError
from tba.model_folder import check_tokenizer
from tba_trainer.lora import add_adapter, remove_adapter
from tba_trainer.parallel.sharding import is_sharded, sharded_copy
from tba_trainer.parameters import assign

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRAIN_MODE_MAX_GAP = 1e-3
"""Of the largest logit: rounding stays far below it, dropout far above."""
SIDE_FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Config and tokenizer files; weights are .safetensors, and nothing else is taken along."""


def load_policy(section: ModelSection, *, device: str, gradient_checkpointing: bool) -> Any:
    """The starting model in float32 on `device`, dropout off, with a LoRA adapter where the recipe wants one.

    Raises:
        ConfigError: the folder is missing or is not a model in Hugging Face format, the device does not exist, the
            adapter does not fit the model, or gradient checkpointing is wanted of a model that is random in train mode.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder = _model_folder(section)
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
    model = _prepared(model, section, gradient_checkpointing)
    if gradient_checkpointing:
        _check_train_mode(model, section.path)
    return model


def empty_policy(section: ModelSection, *, gradient_checkpointing: bool) -> Any:
    """The same model without its weights, on the meta device: what a process holds that is going to be sent a shard.

    Raises:
        ConfigError: the folder is missing or holds no config of a model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, auto = _model_folder(section), AutoModelForCausalLM
    trust = section.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        with torch.device("meta"):
            model = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.path {section.path!r} cannot be loaded: {first_line}") from None
    return _prepared(model, section, gradient_checkpointing)


def _model_folder(section: ModelSection) -> Path:
    folder = Path(section.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path {section.path!r} holds no model (no config.json); give a folder in Hugging Face format, "
            "or name a task under [model.warm_start] and let `tba run` make the model"
        )
    return folder


def _prepared(model: Any, section: ModelSection, gradient_checkpointing: bool) -> Any:
    if section.lora is not None:
        add_adapter(model, section.lora)
    without_dropout(model)
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # Hugging Face checkpoints activations in train mode only; dropout is off all the same
    return model


def without_dropout(model: Any) -> None:
    """Set every dropout probability to 0: trainer log-probs must be those of the policy that samples.

    Some families have no dropout module: they give a number of their own, or of their config, to `functional.dropout`
    (dropout, layerdrop, attn_pdrop, drop_prob, ...). What is exported is the config file of the starting model.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


@torch.no_grad()
def _check_train_mode(model: Any, path: str) -> None:
    """Two passes in train mode, and one in eval mode, are one and the same function.

    Raises:
        ConfigError: they are not: something random is left, such as a dropout that `without_dropout` does not know.
    """
    rows, columns = torch.arange(4)[:, None], torch.arange(4)[None, :]
    ids = ((4 * rows + columns) % model.get_input_embeddings().num_embeddings).to(model.device)  # [4, 4]
    logits = []
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        for train in (False, True, True):
            model.train(train)
            logits.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float())
    gap = max(float((other - logits[0]).abs().max()) for other in logits[1:])
    if gap > TRAIN_MODE_MAX_GAP * float(logits[0].abs().max()):
        raise ConfigError(
            f"trainer.gradient_checkpointing = true puts the model into train mode, and there {path!r} gives other "
            f"logits (by up to {gap:.2g}), so it has a dropout, or the like, that cannot be switched off; set "
            "trainer.gradient_checkpointing = false"
        )


def frozen_copy(model: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy without gradients and without LoRA adapter, in eval mode, by default in the same dtype.

    Only parameters take the dtype: buffers such as rotary frequencies stay in float32, as `from_pretrained` and every
    engine keep them.
    """
    if is_sharded(model):
        return sharded_copy(model, dtype)
    twin = copy.deepcopy(model)
    remove_adapter(twin)
    twin.requires_grad_(False)
    twin.eval()
    if dtype is not None:
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(dtype)
    return twin


def load_tensors(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Copy whole tensors into the parameters of the same name, one at a time, converting the dtype; a sharded
    parameter takes its shard.

    Raises:
        TbaError: names or shapes are not those of the parameters.
    """
    if parameters.keys() != tensors.keys():
        odd = sorted(parameters.keys() ^ tensors.keys())[0]
        raise TbaError(f"{what}: its parameters are not those of the model ({odd!r} is on one side only)")
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if parameter.shape != tensor.shape:
            raise TbaError(f"{what}: {name} has shape {list(tensor.shape)}, the model has {list(parameter.shape)}")
        assign(parameter, tensor)


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
