"""Log-probs of many canaries, computed as the trainer does and as the engines do, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tba_searcher.engines.engine import EngineSettings
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tba_searcher.engines.weight_loader import load_model
from tba_trainer.model.logprobs import LogprobModel, head_logprobs
from tba_trainer.model.packing import pack_sequences
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tba.versions import START

LAYOUTS = MappingProxyType({"8+8": (8, 8), "16+47": (16, 47)})
"""Tokens of prompt and response of a canary; 63 is all that vLLM checks of a context of 64, the last being sampled."""
STATISTICS = MappingProxyType({"max": np.max, "mean": np.mean, "median": np.median})
"""Of the |log-prob gaps| of a canary's response tokens."""
Logprobs = Mapping[str, NDArray[np.float32]]
"""Layout -> log-probs [N, R] of N canaries with R response tokens."""
SETTINGS: Mapping[str, Any] = {"num_slots": 1, "max_prompt_tokens": 48, "max_response_tokens": 16, "seed": 0}


@dataclass(frozen=True, slots=True)
class Canaries:
    """N canaries of every layout: uniform random tokens; the first ones are the trainer's candidates."""

    tokens: Mapping[str, NDArray[np.int32]]
    """Layout -> [N, P + R]."""

    @classmethod
    def make(cls, vocab_size: int, num: int) -> Canaries:
        """Draw `num` canaries of every layout."""
        return cls(
            {
                name: np.stack(
                    [np.random.default_rng(i).integers(0, vocab_size, sum(sizes), dtype=np.int32) for i in range(num)]
                )
                for name, sizes in LAYOUTS.items()
            }
        )

    def first(self, num: int) -> Canaries:
        """Return the first `num` of every layout."""
        return Canaries({name: rows[:num] for name, rows in self.tokens.items()})

    def pairs(self, layout: str) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yield prompt [P] and response [R] of every canary."""
        num_prompt = LAYOUTS[layout][0]
        for row in self.tokens[layout]:
            yield row[:num_prompt], row[num_prompt:]


class HasCanary(Protocol):
    """An engine."""

    def canary_logprobs(self, prompt_tokens: Any, response_tokens: Any) -> NDArray[np.float32]:
        """Return the log-probs [R] of a response."""
        ...


def engine_logprobs(engine: HasCanary, canaries: Canaries) -> Logprobs:
    """Ask an engine for its log-probs, as `check_loaded` does."""
    return {
        layout: np.stack([engine.canary_logprobs(p.tolist(), r.tolist()) for p, r in canaries.pairs(layout)])
        for layout in LAYOUTS
    }


def embedded_logprobs(folder: Path, dtype: str, canaries: Canaries) -> Logprobs:
    """Return what the embedded engine finds with the weights of a folder."""
    return engine_logprobs(EmbeddedEngine(folder, START, EngineSettings(dtype=dtype, **SETTINGS)), canaries)


@torch.no_grad()
def trainer_logprobs(
    folder: Path, dtype: str, canaries: Canaries, *, autocast_dtype: torch.dtype | None = None
) -> Logprobs:
    """Return the canaries that a trainer on the CPU would publish with the weights of a folder, rounded to `dtype`."""
    weights = load_model(folder, dtype=dtype, device="cpu", trust_remote_code=False)
    model = LogprobModel(weights, temperature=1.0, autocast_dtype=autocast_dtype)
    return {
        layout: np.stack(
            [model.token_logprobs(pack_sequences([p], [r], "cpu")).numpy() for p, r in canaries.pairs(layout)]
        )
        for layout in LAYOUTS
    }


@torch.no_grad()
def wide_head_logprobs(folder: Path, dtype: str, canaries: Canaries) -> Logprobs:
    """Return the same with logits that are not rounded to `dtype`, as on a GPU (`logprobs.WIDE_PRODUCTS`)."""
    model = load_model(folder, dtype=dtype, device="cpu", trust_remote_code=False)
    weight = model.get_output_embeddings().weight.float()

    def one(prompt: NDArray[np.int32], response: NDArray[np.int32]) -> NDArray[np.float32]:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        return head_logprobs(hidden.float(), weight, None, ids[len(prompt) :], temperature=1.0).numpy()

    return {layout: np.stack([one(*pair) for pair in canaries.pairs(layout)]) for layout in LAYOUTS}


class _Tf32Products(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.addmm):
            args = [_round_to_tf32(arg) if isinstance(arg, Tensor) else arg for arg in args]
        return func(*args, **(kwargs or {}))


def _round_to_tf32(tensor: Tensor) -> Tensor:
    # 10 of the 23 bits of a float32's fraction stay, to nearest
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def tf32_products() -> TorchFunctionMode:
    """Return a context in which the inputs of matrix products outside of attention are rounded as those of TF32."""
    return _Tf32Products()


def gaps(found: Logprobs, published: Logprobs) -> dict[str, list[list[float]]]:
    """Return layout -> |gaps| [N, R] of every canary; `published` may hold more canaries than `found`."""
    distances = {layout: np.abs(values - published[layout][: len(values)]) for layout, values in found.items()}
    return {layout: [[float(f"{gap:.3g}") for gap in row] for row in rows] for layout, rows in distances.items()}
