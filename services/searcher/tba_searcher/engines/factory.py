"""Builds the engine that a recipe names; the one place that knows all built-in engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba import plugins
from tba.versions import PolicyVersion
from tba.wire import Manifest
from tba_searcher.engines.engine import Engine, EngineSettings

if TYPE_CHECKING:
    from tba.config import Recipe


def build_engine(
    recipe: Recipe, folder: Path, version: PolicyVersion, manifest: Manifest | None, *, seed: int
) -> Engine:
    """Build the engine that `searcher.engine` names and load the weights of `version`; the caller verifies them.

    Args:
        folder: model folder in Hugging Face format with the tensors of `manifest`, its config and its tokenizer.
        manifest: None for a folder that is no published version (`tba evaluate --model`): `model.dtype` is used then.
        seed: seeds the engine's own random stream (`tba_searcher.service`).

    Raises:
        ConfigError: no engine has this name, or it cannot use the folder's model, the device or the settings.
        EngineError: the weights cannot be loaded.
    """
    settings = recipe.searcher
    if manifest is None:
        dtype, names = recipe.model.dtype, sorted(path.name for path in folder.glob("*.safetensors"))
    else:
        dtype, names = manifest.dtype, list(dict.fromkeys(entry.file for entry in manifest.tensors))
    paths = tuple(folder / name for name in names)
    general: dict[str, Any] = {
        "num_slots": settings.num_slots,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "max_response_tokens": settings.max_response_tokens,
        "seed": seed,
        "dtype": dtype,
        "device": settings.device,
        "trust_remote_code": recipe.model.trust_remote_code,
    }
    # each engine is imported only here: vLLM's environment must be set first, and the simulated engine needs no torch
    if settings.engine == "simulated":
        from tba_searcher.engines.simulated import SimulatedEngine

        return SimulatedEngine(folder, paths, version, EngineSettings(**general))
    if settings.engine == "vllm":
        from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings

        own = VllmSettings(**general, section=settings.vllm, tensor_parallel_size=settings.tensor_parallel_size)
        return VllmEngine(folder, paths, version, own)
    if settings.engine == "openai":
        from tba_searcher.engines.openai.engine import OpenAiEngine, OpenAiSettings

        behind = OpenAiSettings(**general, section=settings.openai, ca_file=recipe.tls.ca_file)
        return OpenAiEngine(folder, paths, version, behind)
    if settings.engine == "embedded":
        from tba_searcher.engines.torch.engine import EmbeddedEngine

        return EmbeddedEngine(folder, version, EngineSettings(**general))
    arguments = (folder, version, EngineSettings(**general))
    return plugins.build(settings.engine, *arguments, what="searcher.engine", kind=Engine)
