"""Passes over right-padded rows, for model families whose attention cannot be told where a sequence ends.

Sequences of about the same length share a pass (the buckets of attention.py), so that little of it is padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tba_trainer.attention import Segments
from tba_trainer.packing import PackedSequences

Forward = Callable[[Int[Tensor, "b L"], Int[Tensor, "b L"], Int[Tensor, "b L"]], Float[Tensor, "b L X"]]
"""Token ids, attention mask and position ids of padded rows, to a vector for every position."""


def padded_outputs(forward: Forward, sequences: PackedSequences, segments: Segments) -> Float[Tensor, "T X"]:
    """What `forward` gives at the predictor of every response token, one pass per bucket of `segments`.

    Attention and response masks come from lengths. What stands in padded places is never read: it comes after the
    end of its sequence.
    """
    ids = sequences.input_ids[0].index_select(0, segments.sources)  # [Q]
    real = torch.zeros_like(ids).index_fill(0, segments.places, 1)  # [Q]
    wanted, order = segments.places[sequences.predictors].sort()  # [T]: a bucket's tokens stand together
    picked = []
    start = taken = 0
    for num_rows, width in segments.buckets:
        shape, end = (num_rows, width), start + num_rows * width
        positions = torch.arange(width, device=ids.device).expand(shape)
        outputs = forward(ids[start:end].view(shape), real[start:end].view(shape), positions)  # [b, L, X]
        num_taken = int(torch.searchsorted(wanted, end))
        picked.append(outputs.flatten(0, 1).index_select(0, wanted[taken:num_taken] - start))
        start, taken = end, num_taken
    return torch.cat(picked).index_select(0, order.argsort())
