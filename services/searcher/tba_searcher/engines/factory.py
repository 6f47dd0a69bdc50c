"""The one place that knows all engines: a recipe and a pulled model folder become a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tba.versions import PolicyVersion
from tba.wire import Manifest
from tba_searcher.engines.base import Engine

if TYPE_CHECKING:
    from tba.config import Recipe


def build_engine(
    recipe: Recipe, folder: Path, version: PolicyVersion, manifest: Manifest | None, *, seed: int
) -> Engine:
    """The engine that `searcher.engine` names, with the weights of `version`, not yet verified.

    Each engine's libraries are imported here and not before: vLLM's environment has to be set first, and a simulated
    engine needs no torch.

    Args:
        folder: model folder in Hugging Face format with the tensors of `manifest`, its config and its tokenizer.
        manifest: None for a folder that is no published version (`tba evaluate --model`); `model.dtype` then holds.
        seed: of the engine's own random stream (`tba_searcher.seeds`).

    Raises:
        ConfigError: the folder's model, the device or the settings do not suit the engine.
        EngineError: the weights cannot be loaded.
    """
    settings = recipe.searcher
    lengths = {"max_prompt_tokens": settings.max_prompt_tokens, "max_response_tokens": settings.max_response_tokens}
    if manifest is None:
        dtype, names = recipe.model.dtype, sorted(path.name for path in folder.glob("*.safetensors"))
    else:
        dtype, names = manifest.dtype, [stored.name for stored in manifest.tensors]
    paths = tuple(folder / name for name in names)
    if settings.engine == "simulated":
        from tba_searcher.engines.simulated import SimulatedEngine, SimulatedSettings

        return SimulatedEngine(
            folder,
            paths,
            version,
            SimulatedSettings(num_slots=settings.num_slots, **lengths, seed=seed, behaviour=settings.simulated),
        )
    if settings.engine == "vllm":
        from tba_searcher.engines.vllm_engine import VllmEngine, VllmSettings

        return VllmEngine(
            folder,
            paths,
            version,
            VllmSettings(
                num_slots=settings.num_slots,
                **lengths,
                seed=seed,
                dtype=dtype,
                device=settings.device,
                trust_remote_code=recipe.model.trust_remote_code,
                section=settings.vllm,
            ),
        )
    from tba_searcher.engines.embedded import EmbeddedEngine, EmbeddedSettings

    return EmbeddedEngine(
        folder,
        version,
        EmbeddedSettings(
            num_slots=settings.num_slots,
            **lengths,
            seed=seed,
            dtype=dtype,
            device=settings.device,
            trust_remote_code=recipe.model.trust_remote_code,
        ),
    )
