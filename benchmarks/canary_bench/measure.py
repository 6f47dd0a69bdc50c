"""The gaps of one model: noise (right weights, computed in two ways) and signal (an engine with wrong weights)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.canary_bench.defects import Weights, wrong_weights
from benchmarks.canary_bench.gaps import (
    SETTINGS,
    Canaries,
    Logprobs,
    embedded_logprobs,
    engine_logprobs,
    gaps,
    tf32_products,
    trainer_logprobs,
    wide_head_logprobs,
)
from tba.versions import PolicyVersion

WRONG = PolicyVersion(1, 1)
_ENGINES: list[Any] = []
"""Engines of vLLM stay: the end of one ends what all of a process share."""
NOISE = {
    "embedded": "embedded engine",
    "embedded, wide": "embedded engine, float32 logits in the trainer",
    "vllm": "vLLM",
    "vllm, wide": "vLLM, float32 logits in the trainer",
    "rounded weights": "float32, masters against rounded weights",
    "rounded computation": "rounded weights, computed in float32",
    "masters": "the trainer's own gap, it computes in float32",
    "autocast": "the trainer's own gap, it computes in bfloat16",
}
"""What is compared with the trainer's canary of the same weights."""


@dataclass(slots=True)
class Measured:
    """What was found for one model; gaps are layout -> [N, R]: every response token of every canary."""

    name: str
    folder: Path
    canaries: Canaries
    wrong_folders: dict[str, Path] = field(default_factory=dict)
    published: dict[str, Logprobs] = field(default_factory=dict)
    """By dtype; `dtype, wide`: with float32 logits."""
    noise: dict[str, dict[str, Any]] = field(default_factory=dict)
    """dtype -> one of NOISE -> gaps."""
    signal: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Engine -> dtype -> defect -> gaps."""
    notes: list[str] = field(default_factory=list)

    def add_noise(self, dtype: str, engine: str, found: Logprobs) -> None:
        """Compare an engine's log-probs with the trainer's of the same weights."""
        noise = self.noise.setdefault(dtype, {})
        noise[engine] = gaps(found, self.published[dtype])
        if dtype != "float32":
            noise[f"{engine}, wide"] = gaps(found, self.published[f"{dtype}, wide"])

    def add_signal(self, dtype: str, engine: str, defect: str, found: Logprobs) -> None:
        """Compare the log-probs of wrong weights with the trainer's of the right ones."""
        self.signal.setdefault(engine, {}).setdefault(dtype, {})[defect] = gaps(found, self.published[dtype])

    def document(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {"name": self.name, "noise": self.noise, "signal": self.signal, "notes": self.notes}


def measure_torch(
    name: str, folder: Path, scratch: Path, *, dtypes: list[str], num_canaries: int, num_signal: int
) -> Measured:
    """Measure everything that needs no vLLM.

    Args:
        folder: model in Hugging Face format, in float32.
        scratch: for folders with wrong weights.
        num_canaries: for the noise.
        num_signal: of them, the first so many for the signal of every defect.
    """
    right = Weights.of(folder)
    # by the names that the wrong ones have: files that transformers saves call GPT-NeoX's head otherwise
    measured = Measured(
        name, right.write(scratch / "right", folder), Canaries.make(right.config["vocab_size"], num_canaries)
    )
    first = measured.canaries.first(num_signal)
    for defect, weights in wrong_weights(folder):
        target = scratch / f"wrong-{len(measured.wrong_folders)}"
        measured.wrong_folders[defect] = weights.write(target, folder)
    masters = trainer_logprobs(folder, "float32", measured.canaries)
    autocast = trainer_logprobs(folder, "float32", measured.canaries, autocast_dtype=torch.bfloat16)
    for dtype in dtypes:
        measured.published[dtype] = masters
        if dtype != "float32":
            measured.published[dtype] = trainer_logprobs(folder, dtype, measured.canaries)
            measured.published[f"{dtype}, wide"] = wide_head_logprobs(folder, dtype, measured.canaries)
        measured.add_noise(dtype, "embedded", embedded_logprobs(folder, dtype, measured.canaries))
        if dtype != "float32":
            rounded = _float32_logprobs_of_rounded(right, dtype, scratch, folder, measured.canaries)
            measured.noise[dtype]["rounded weights"] = gaps(rounded, masters)
            measured.noise[dtype]["rounded computation"] = gaps(rounded, measured.published[dtype])
            measured.noise[dtype]["masters"] = gaps(masters, measured.published[dtype])
            measured.noise[dtype]["autocast"] = gaps(autocast, measured.published[dtype])
        else:
            with tf32_products():
                tf32 = embedded_logprobs(folder, dtype, first)
            measured.add_signal(dtype, "embedded", "products in TF32 (emulated)", tf32)
        for defect, wrong in measured.wrong_folders.items():
            measured.add_signal(dtype, "embedded", defect, embedded_logprobs(wrong, dtype, first))
    return measured


def measure_vllm(measured: Measured, *, dtypes: list[str], num_signal: int) -> None:
    """Add what vLLM finds: the noise, and the defects that keep the names of tensors and the configuration."""
    from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings

    first = measured.canaries.first(num_signal)
    right = Weights.of(measured.folder)
    tensors = {None: measured.folder, **measured.wrong_folders}
    loadable = {}
    for defect, folder in tensors.items():
        weights = Weights.of(folder)
        same_config = {**weights.config, "transformers_version": 0} == {**right.config, "transformers_version": 0}
        if same_config and weights.tensors.keys() == right.tensors.keys():
            loadable[defect] = [folder / "model.safetensors"]
    for dtype in dtypes:
        settings = VllmSettings(dtype=dtype, **SETTINGS)
        try:
            engine = VllmEngine(measured.folder, loadable[None], WRONG, settings)
            _ENGINES.append(engine)
            measured.add_noise(dtype, "vllm", engine_logprobs(engine, measured.canaries))
            for defect, paths in loadable.items():
                if defect is not None:
                    engine.load_weights(paths, WRONG)
                    measured.add_signal(dtype, "vllm", defect, engine_logprobs(engine, first))
        except Exception as error:  # vLLM refuses a model in many ways; the other numbers count
            measured.notes.append(f"{dtype} in vLLM: {type(error).__name__}: {error}")


def _float32_logprobs_of_rounded(right: Weights, dtype: str, scratch: Path, base: Path, canaries: Canaries) -> Logprobs:
    """Return what the trainer finds with weights that are rounded to `dtype` and computes in float32."""
    rounded = right.copy()
    rounded.tensors = {name: t.to(getattr(torch, dtype)).float() for name, t in right.tensors.items()}
    folder = rounded.write(scratch / f"rounded-{dtype}", base)
    found = trainer_logprobs(folder, "float32", canaries)
    shutil.rmtree(folder)
    return found
