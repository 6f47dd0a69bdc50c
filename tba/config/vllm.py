"""The section `searcher.vllm`: what only the vLLM engine reads (`searcher.engine = "vllm"`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.config.base import StrictModel

VLLM_MAX_TEMPERATURE = 2.0
"""vLLM refuses requests above."""


class VllmSection(StrictModel):
    """vLLM in the searcher's process. `searcher.num_slots` is the number of sequences in a batch."""

    block_size: Literal[32, 64, 128] = 32
    """Tokens in one block of keys and values; a prompt's whole blocks are computed once and shared."""
    prefix_caching: bool = True
    """Keys and values of a prompt are kept for the next response to it. A weight update drops all of them."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values. None: on the CPU what `num_slots` responses of full length need, on a GPU what
    `gpu_memory_share` leaves. With less than all slots need, vLLM preempts sequences and computes them again."""
    gpu_memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that vLLM may use for weights, keys and values, and its work space."""
    max_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one step, with those of prompts; longer prompts are computed in pieces. None: vLLM's choice."""
    enforce_eager: bool = False
    """On a GPU: no compilation and no CUDA graphs; the start is faster, decoding slower. The CPU always runs so."""
