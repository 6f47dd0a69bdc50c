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

from tba.versions import START

LAYOUTS = MappingProxyType({"8+8": (8, 8), "16+47": (16, 47)})
"""Tokens of prompt and response of a canary; 63 is all that vLLM checks of a context of 64, the last being sampled."""
STATISTICS = MappingProxyType({"max": np.max, "mean": np.mean})
"""Of the |log-prob gaps| of a canary's response tokens."""
Logprobs = Mapping[str, NDArray[np.float32]]
"""Layout -> log-probs [N, R] of N canaries with R response tokens."""
SETTINGS: Mapping[str, Any] = {"num_slots": 1, "max_prompt_tokens": 48, "max_response_tokens": 16, "seed": 0}


@dataclass(frozen=True, slots=True)
class Canaries:
    """N canaries of every layout: uniform random tokens, as the trainer's; the first of them is the trainer's own."""

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
def trainer_logprobs(folder: Path, dtype: str, canaries: Canaries) -> Logprobs:
    """Return the canaries that a trainer on the CPU would publish with the weights of a folder, rounded to `dtype`."""
    model = LogprobModel(load_model(folder, dtype=dtype, device="cpu", trust_remote_code=False), temperature=1.0)
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


def gaps(found: Logprobs, published: Logprobs) -> dict[str, dict[str, list[float]]]:
    """Return layout -> statistic -> the gap of every canary; `published` may hold more canaries than `found`."""
    result = {}
    for layout, logprobs in found.items():
        distance = np.abs(logprobs - published[layout][: len(logprobs)])  # [N, R]
        result[layout] = {name: reduce(distance, axis=1).tolist() for name, reduce in STATISTICS.items()}
    return result
