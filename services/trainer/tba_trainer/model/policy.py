"""The policy as a Hugging Face model with float32 master weights: load it, copy it, adapt it with LoRA, compile it."""

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
from tba.config.trainer import LoraSection
from tba.errors import ConfigError, TbaError, not_installed
from tba.model_folders import check_load_report, check_tokenizer, trust_hint
from tba_trainer.model.logprobs import AUTOCAST_EXPERTS, autocast_experts
from tba_trainer.model.packing import PACKED_ATTENTION, packed_attention
from tba_trainer.model.parameters import ADAPTER, assign, is_adapted
from tba_trainer.model.sharding import is_sharded, sharded_copy
from tba_trainer.model.slices import TensorSlice

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRAIN_MODE_MAX_GAP = 1e-3
"""Largest gap of logits between train and eval mode, as a share of the largest logit: above rounding, below dropout."""
SIDE_FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Config and tokenizer files that are published with the weights."""


def load_policy(section: ModelSection, *, device: str, gradient_checkpointing: bool) -> Any:
    """Load the starting model in float32 on `device`, dropout off, with a LoRA adapter where the recipe has one.

    Raises:
        ConfigError: the folder is missing or is not a model in Hugging Face format, the device does not exist, the
            adapter does not fit the model, or gradient checkpointing is on and the model is random in train mode.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(
            _model_folder(section),
            dtype=torch.float32,
            use_safetensors=True,  # never a pickle: loading one runs its code
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unloadable(section, error) from None
    check_load_report(report, model, where=f"model.path {section.path!r}")
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(f"trainer.device {device!r} cannot be used: {text}") from None
    model = prepare(model, section.lora, gradient_checkpointing)
    if gradient_checkpointing:  # only then the model is in train mode
        check_train_mode(model, section.path)
    return model


def empty_policy(section: ModelSection, *, gradient_checkpointing: bool) -> Any:
    """Return the model of `load_policy` without weights, on the meta device, for a process that receives a shard."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, trust = _model_folder(section), section.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(section, error) from None
    return prepare(model, section.lora, gradient_checkpointing)


def _unloadable(section: ModelSection, error: Exception) -> ConfigError:
    text = str(error).strip().partition("\n")[0]
    return ConfigError(f"model.path {section.path!r} cannot be loaded: {text}{trust_hint(error)}")


def _model_folder(section: ModelSection) -> Path:
    folder = Path(section.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path {section.path!r} holds no model (no config.json); give a folder in Hugging Face format, "
            "or name a task under [model.warm_start] and let `tba run` make the model"
        )
    return folder


def prepare(model: Any, lora: LoraSection | None, gradient_checkpointing: bool) -> Any:
    """Prepare a model for training in place: add a LoRA adapter if `lora` is given, switch dropout off, set the mode.

    Args:
        gradient_checkpointing: compute decoder layers again in the backward pass; sets train mode instead of eval mode.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    if lora is not None:
        add_adapter(model, lora)
    disable_dropout(model)
    model.eval()
    if gradient_checkpointing:
        # the reentrant kind gives a layer no gradient where its input has none: with LoRA that is the first layer
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # Hugging Face checkpoints activations in train mode only; dropout is off all the same
    return model


def disable_dropout(model: Any) -> None:
    """Set every dropout probability to 0: trainer log-probs must be those of the policy that samples.

    Published models keep the dropout values of the starting model's config file.
    """
    # some families have no dropout module: they pass a number of a module, or of the config, to `functional.dropout`
    # (dropout, layerdrop, attn_pdrop, drop_prob, ...)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


@torch.no_grad()
def check_train_mode(model: Any, path: str) -> None:
    """Check that two passes in train mode give the logits of eval mode.

    Raises:
        ConfigError: something random is left, such as a dropout that `disable_dropout` does not know.
    """
    rows, columns = torch.arange(4)[:, None], torch.arange(4)[None, :]
    ids = ((4 * rows + columns) % model.get_input_embeddings().num_embeddings).to(model.device)  # [4, 4]
    logits = []
    # Two passes in train mode: a random depth, for example, may leave one of them whole. The forked generator keeps the
    # run's random numbers as they are.
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        for train in (False, True, True):
            model.train(train)
            logits.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float())
    gap = max(float((other - logits[0]).abs().max()) for other in logits[1:])
    if gap > TRAIN_MODE_MAX_GAP * float(logits[0].abs().max()):
        raise ConfigError(
            f"trainer.gradient_checkpointing = true puts the model into train mode, and there {path!r} gives different "
            f"logits (by up to {gap:.2g}), so it has a dropout, or something similar, that cannot be switched off; set "
            "it to false"
        )


def frozen_copy(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a copy without gradients and without LoRA adapter, in eval mode, by default in the same dtype."""
    if is_sharded(model):
        return sharded_copy(model, dtype)
    copied = copy.deepcopy(model)
    # without its adapter, which was never merged, a layer is that of the starting model
    for module in list(copied.modules()):
        for name, child in list(module.named_children()):
            if is_adapted(child):
                setattr(module, name, child.base_layer)
    copied.requires_grad_(False)
    copied.eval()
    if dtype is not None:
        # parameters only: `from_pretrained` and every engine keep buffers such as rotary frequencies in float32
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(dtype)
    return copied


def load_tensors(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor] | Mapping[str, TensorSlice], *, what: str
) -> None:
    """Copy tensors one at a time into the parameters of the same name (see `assign`).

    `what` names the source in messages. Raises TbaError if names or shapes differ.
    """
    if parameters.keys() != tensors.keys():
        odd = sorted(parameters.keys() ^ tensors.keys())[0]
        raise TbaError(f"{what}: its parameters are not those of the model ({odd!r} is on one side only)")
    for name, parameter in parameters.items():
        tensor = tensors[name]  # read from a file, or broadcast to the team: never two at once
        if parameter.shape != tensor.shape:
            raise TbaError(f"{what}: {name} has shape {list(tensor.shape)}, the model has {list(parameter.shape)}")
        assign(parameter, tensor)


def side_files(folder: str | Path, *, trust_remote_code: bool) -> dict[str, Path]:
    """Return config and tokenizer files of a model folder by name; Python files only with `trust_remote_code`."""
    check_tokenizer(folder)
    suffixes = (*SIDE_FILE_SUFFIXES, ".py") if trust_remote_code else SIDE_FILE_SUFFIXES
    # an index names the shards of the starting model, and the published files have other names
    return {
        path.name: path
        for path in sorted(Path(folder).iterdir())
        if path.is_file() and path.suffix in suffixes and not path.name.endswith(".index.json")
    }


def add_adapter(model: Any, section: LoraSection) -> None:
    """Add a LoRA adapter (arXiv 2106.09685) to the linear layers but the output head in place, and freeze the rest.

    An untrained adapter adds zero; its initial values come from torch's random numbers. The model keeps the starting
    weights, so without its adapter it is the reference: no second model is needed.

    Raises:
        ConfigError: peft is not installed, or `target_modules` names anything but such layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise not_installed("[model.lora]", "peft") from None
    from transformers.pytorch_utils import Conv1D

    # The output head stays as it is: with an adapter on it, log-probs could not be computed in chunks (logprobs.py).
    head, kinds = model.get_output_embeddings(), (torch.nn.Linear, Conv1D)
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, kinds) and module is not head
    }
    if section.target_modules is not None:
        known = sorted({name.rpartition(".")[2] for name in layers})
        if unknown := [name for name in section.target_modules if name not in known]:
            raise ConfigError(
                f"model.lora.target_modules names {unknown[0]!r}, which is not a linear layer of this model before its "
                f"output head; it has {', '.join(known)}"
            )
        layers = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in section.target_modules}
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=0.0,  # trainer log-probs must be those of the policy that samples
        bias="none",
        target_modules=list(layers),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),  # gpt2 keeps weights transposed
    )
    # in a module without `config`: of a mixture of experts peft would adapt the experts in place of layers like theirs
    inject_adapter_in_model(config, torch.nn.ModuleList([model]), adapter_name=ADAPTER)


def compile_layers(model: Any, *, backend: str = "inductor") -> None:
    """Let torch.compile compile the decoder layers, in place, at their first pass.

    Attention, the products of experts and copies of the model are not compiled. Neither are the collectives of a
    sharded layer, because FSDP2 keeps its hooks out of the compiler.

    Args:
        backend: backend of torch.compile.

    Raises:
        ConfigError: transformers does not say which of its modules are decoder layers.
    """
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"trainer.compile = true: {type(model).__name__} has no decoder layers that transformers marks as such; "
            "set it to false"
        )
    # not a decorator of the function: that would import the compiler, a second of CPU, in every trainer
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    # compiled, transformers takes a loop over the experts in float32, whose backward pass cannot be compiled
    ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_EXPERTS, torch.compiler.disable(autocast_experts))
    # one program for all layers and any number of tokens: another micro-batch size compiles nothing again
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
