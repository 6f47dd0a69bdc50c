"""Checks that the embedded engine decodes a model exactly: first by the model's config, then by a trial.

The engine's log-probs must equal those of a forward pass over the whole sequence, which the trainer computes. Windowed
layers, positions that are scaled by the sequence length, and state besides keys and values break this without an error.
The trial decodes short sequences and one that is longer than each window.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.errors import ModelError

MAX_GAP = {"float32": 0.005, "float16": 0.125, "bfloat16": 0.5}
"""Largest mean gap per sequence, in nats, by dtype. Rounding stays below it (docs/results.md, "Canary tolerances")."""
NUM_TOKENS = 8
"""Most tokens that the trial decodes per sequence."""
MIN_TRIED = 96
"""Length of the trial's long sequence, in tokens, if no window asks for more. Each pass costs more with it."""
WAY_OUT = 'use searcher.engine = "vllm", or another model'
FULL, SLIDING = "full_attention", "sliding_attention"


def attention_windows(config: Any, max_len: int) -> dict[str, int | None]:
    """Return the attention window, in tokens, of each kind of layer in a text config; None: it sees all `max_len`."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = set(getattr(config, "layer_types", None) or [SLIDING if window else "chunked_attention" if chunk else FULL])
    if chunk and max_len <= chunk:
        kinds -= {"chunked_attention"}
    if odd := kinds - {FULL, SLIDING}:
        raise ModelError(
            f"the embedded engine does not decode layers of kind {', '.join(sorted(odd))}, which this "
            f"{config.model_type} model has; {WAY_OUT}"
        )
    return {kind: window if kind == SLIDING and window and window < max_len else None for kind in kinds}


def tried_length(config: Any, max_len: int) -> int:
    """Return the length of the trial's long sequence: beyond every window in the config, at most `max_len`."""
    named = [value for key, value in config.to_dict().items() if re.search("window|chunk|local|block", key)]
    limits = [value + 3 * NUM_TOKENS for value in named if isinstance(value, int) and value < max_len]
    return min(max_len, max([MIN_TRIED, *limits]))


def check_positions(config: Any, max_len: int) -> None:
    """Raise ModelError if positions are scaled by the sequence length: log-probs would change as a response grows."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        limit = each.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", max_len)
        if each.get("rope_type") in ("dynamic", "longrope") and max_len > limit:
            raise ModelError(
                f"the positions of this {config.model_type} model ({each['rope_type']}) change with the length of a "
                f"sequence beyond {limit} tokens, so a token has other log-probs while its response grows; keep "
                f"searcher.max_prompt_tokens + searcher.max_response_tokens (now {max_len}) within {limit}"
            )


def check_gap(decoded: NDArray[np.float32], whole: NDArray[np.float32], *, dtype: str, what: str) -> None:
    """Raise ModelError if decoded log-probs [N, tokens] are too far from those of passes over the whole sequences."""
    # the mean: in a mixture of experts, rounding sends single tokens to other experts
    gap = float(np.abs(decoded - whole).mean(axis=1).max())
    if not gap <= MAX_GAP[dtype]:
        raise ModelError(
            f"the embedded engine does not decode this {what} exactly: with its key-value cache, log-probs are off by "
            f"{gap:.3g} nats from a pass over the whole sequence (limit {MAX_GAP[dtype]}); a limited window, positions "
            f"that are scaled by the length, or state besides keys and values may be the cause; {WAY_OUT}"
        )
