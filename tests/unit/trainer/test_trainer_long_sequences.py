"""Memory of the output head and of attention at 32,768 tokens, traced: fake tensors have sizes and no values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tba_trainer.memory_trace.fake_device import LiveBytes, cuda_branches
from tba_trainer.model.logprobs import CHUNK_BYTES, head_logprobs
from tba_trainer.model.packing import WINDOW_BLOCK, find_segments, packed_attention
from torch._subclasses.fake_tensor import FakeTensorMode

NUM_TOKENS = 32_768
SLACK_BYTES = 2**26
"""For numbers per token."""


def test_the_head_holds_a_chunk_of_logits_and_one_gradient_of_its_weight() -> None:
    """The sizes of Qwen2.5-7B in bfloat16 over float32 weights, with the branches of a GPU: 19 chunks."""
    vocab_size, hidden_size = 152_064, 3584
    with FakeTensorMode(), cuda_branches():
        hidden = torch.empty(NUM_TOKENS, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab_size, hidden_size, requires_grad=True)
        targets = torch.zeros(NUM_TOKENS, dtype=torch.long)
        with LiveBytes() as live:
            before = live.held
            with torch.autocast("cpu", dtype=torch.bfloat16):
                values = head_logprobs(hidden, weight, None, targets, temperature=0.7)
            values.sum().backward()
            peak = live.peak - before
    logits = 1.5 * CHUNK_BYTES["cuda"]  # and their copy in 16 bits
    of_weight = weight.numel() * (2 + 4)  # in 16 bits, and its gradient
    assert 0.95 < peak / (logits + of_weight + hidden.nbytes + SLACK_BYTES) <= 1


@pytest.mark.parametrize("window", [None, 4096])
def test_attention_of_one_sequence_without_flash_grows_with_its_length_alone(window: int | None) -> None:
    """All pairs of tokens would take 1 GiB as bits of a mask; the outputs take 32 MiB."""
    heads, kv_heads, size = 4, 2, 64
    module: Any = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    with FakeTensorMode():
        segments = find_segments([NUM_TOKENS], "cpu")
        sizes = [(1, n, NUM_TOKENS, size) for n in (heads, kv_heads, kv_heads)]
        query, key, value = (torch.empty(shape, requires_grad=True) for shape in sizes)
        with LiveBytes() as live:
            before = live.held
            out, _ = packed_attention(module, query, key, value, None, sliding_window=window, segments=segments)
            out.sum().backward()
            peak = live.peak - before
    # with a window every block has its keys, copied for each head of queries
    mask = 0 if window is None else WINDOW_BLOCK * (window + WINDOW_BLOCK) * 6  # as bits, twice, and as numbers
    assert peak < 18 * query.nbytes + mask
