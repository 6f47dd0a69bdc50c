"""Attention over packed sequences and log-probs of the output head, against plain float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tba_trainer.model import context, logprobs, packing
from tba_trainer.model.logprobs import CHUNK_BYTES, head_logprobs
from tba_trainer.model.packing import PackedSequences, Segments, find_segments, pack_sequences, packed_attention
from torch import Tensor

from benchmarks.gpu_bench.check import Bench, Findings, seconds_of
from benchmarks.gpu_bench.models import relative_error

FORWARD_LIMIT = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Relative error of outputs: about two roundings (2^-8, 2^-11, 2^-24)."""
GRADIENT_LIMIT = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}
GROUPED, WIDE, ODD = (14, 2, 64), (12, 2, 128), (8, 8, 80)
"""Heads, heads of keys and values, dimension of a head: as Qwen2.5-0.5B and 1.5B, and GPT-NeoX 2.8B."""
SHORT = [1, 2, 3, 5, 8, 17, 64, 65, 130]
CASES = [
    # heads, lengths, window
    (GROUPED, SHORT, None),
    (WIDE, SHORT, 41),  # odd: masks begin where the kernels of a card cannot read them
    (ODD, SHORT, None),
    (WIDE, [1, 4096, 777, 33], None),
    (GROUPED, [512] * 4, None),
    (GROUPED, [512] * 4, 100),
]
HEAD_PEAK_LIMIT = 1.1
"""Measured peak of the head by what its chunks, copies and gradients come to."""


def check_attention(bench: Bench, found: Findings) -> None:
    """Compare packed attention with plain float64 attention of each sequence, outputs and gradients."""
    dtypes = [torch.float32, torch.bfloat16] if bench.quick else [torch.bfloat16, torch.float16, torch.float32]
    cases = [((4, 2, 16), [1, 2, 3, 17], window) for window in (None, 5)] if bench.quick else CASES
    for dtype in dtypes:
        ways = ["packed", "parts"] if dtype == torch.float32 or bench.quick else ["packed", "parts", "buckets"]
        worst: dict[str, float] = {}
        for shape, lengths, window in cases:
            sequences = _sequences(lengths, bench.device, share=max(lengths) < 200)
            segments = find_segments(sequences.lengths, bench.device, positions=sequences.positions)
            inputs = _inputs(segments, shape, dtype, bench.device)
            expected = _plain(inputs, segments, window)
            for way in ways:
                if way == "parts":
                    results = _attend_in_parts(inputs, sequences, window)
                else:
                    results = _attend(inputs, segments, window, buckets=way == "buckets")
                for what, one, other in zip(("output", "dq", "dk", "dv"), results, expected, strict=True):
                    key = f"{way}_{_name(dtype)}_{what}_error"
                    worst[key] = max(worst.get(key, 0.0), relative_error(one, other))
        for key, error in worst.items():
            limits = FORWARD_LIMIT if "output" in key else GRADIENT_LIMIT
            found.at_most(key, error, limits[dtype])
    if bench.measures:
        _time_attention(bench, found)


def _sequences(lengths: list[int], device: str, *, share: bool) -> PackedSequences:
    """Return sequences of these lengths, or with one prompt more, which the row holds once."""
    prompts = [np.arange(3, dtype=np.int32) if share else np.array([i], np.int32) for i in range(len(lengths))]
    return pack_sequences(prompts, [np.ones(n, np.int32) for n in lengths], device)


def _inputs(segments: Segments, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return query, key, value [1, N, P, D] and the gradient of the output [1, P, N, D]."""
    num_heads, num_kv_heads, dim = shape
    num_places = len(segments.firsts)
    torch.manual_seed(0)
    sizes = [(1, n, num_places, dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
    tensors = [torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes]
    return [*tensors, torch.randn(1, num_places, num_heads, dim, device=device).to(dtype)]


def _attend(inputs: list[Tensor], segments: Segments, window: int | None, *, buckets: bool = False) -> list[Tensor]:
    """Return output and gradients of the product's attention."""
    query, key, value, grad = inputs
    groups = query.shape[1] // key.shape[1]
    module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True, training=False)
    with patch.object(packing, "FLASH_MAX_HEAD_DIM", 0 if buckets else packing.FLASH_MAX_HEAD_DIM):
        out, _ = packed_attention(module, query, key, value, None, sliding_window=window, segments=segments)
    return [out.detach(), *torch.autograd.grad(out, [query, key, value], grad)]


def _attend_in_parts(inputs: list[Tensor], sequences: PackedSequences, window: int | None) -> list[Tensor]:
    """Return the same as two processes of a context group, one after the other: each is given the other's keys."""
    query, key, value, grad = inputs
    groups = query.shape[1] // key.shape[1]
    module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True, training=False)
    # the token ids say which places of the row a part has
    row = replace(sequences, input_ids=torch.arange(query.shape[2], device=query.device)[None])
    pair = [SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank) for rank in range(2)]
    parts = [context.Context(group).part_of(row) for group in pair]
    here = [part.input_ids[0] for part in parts]
    gathered = torch.cat([tensor[0].transpose(0, 1).index_select(0, at) for at in here for tensor in (key, value)])
    out = torch.zeros_like(grad[0])  # [P, N, D]
    with patch.object(context, "_Gather", SimpleNamespace(apply=lambda rows, _group: gathered.to(rows.dtype))):
        for at, part in zip(here, parts, strict=True):
            q, k, v = (tensor.index_select(2, at) for tensor in (query, key, value))
            found, _ = packed_attention(module, q, k, v, None, sliding_window=window, segments=part.segments)
            num = sum(each for each, _ in part.segments.sizes)  # the rest is padding
            out = out.index_copy(0, at[:num], found[0, :num])
    return [out[None].detach(), *torch.autograd.grad(out, [query, key, value], grad[0])]


def _plain(inputs: list[Tensor], segments: Segments, window: int | None) -> list[Tensor]:
    """Return the same in float64, one sequence after another, with a mask."""
    *leaves, grad = [tensor.detach().double() for tensor in inputs]
    query, key, value = (leaf.requires_grad_() for leaf in leaves)
    groups = query.shape[1] // key.shape[1]
    # an output at a shared place is that of the first sequence that has it
    outs = []
    for start, end in zip(segments.offsets[:-1].tolist(), segments.offsets[1:].tolist(), strict=True):
        places = segments.positions[start:end]
        q, k, v = (tensor[0].index_select(1, places) for tensor in (query, key, value))  # [N, L, D]
        k, v = (tensor.repeat_interleave(groups, dim=0) for tensor in (k, v))
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5  # [N, L, L]
        column = torch.arange(len(places), device=q.device)
        distance = column[:, None] - column[None, :]
        hidden = (distance < 0) | (distance >= (window or len(places)))
        outs.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))  # [L, N, D]
    out = torch.cat(outs).index_select(0, segments.firsts)[None]
    return [out.detach(), *torch.autograd.grad(out, [query, key, value], grad)]


def _time_attention(bench: Bench, found: Findings) -> None:
    """Time forward and backward pass of 32k tokens, lengths spread 1:16 and equal."""
    total, longest = (256, 64) if bench.quick else (32_768, 4096)
    shape = (4, 2, 16) if bench.quick else (12, 2, 128)
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(longest / 16 * 16 ** rng.random()))
    for mix, chosen in (("spread", lengths), ("equal", [longest] * (total // longest))):
        segments = find_segments(chosen, bench.device)
        inputs = _inputs(segments, shape, torch.bfloat16, bench.device)
        # forward 2 products, backward 5; a causal mask leaves half
        flops = 7 * shape[0] * shape[2] * sum(n**2 for n in chosen)
        for way in ("packed", "buckets"):
            attend = partial(_attend, inputs, segments, None, buckets=way == "buckets")
            seconds = seconds_of(attend, bench.device)
            found.note(f"{way}_{mix}_ms", 1e3 * seconds)
            found.note(f"{way}_{mix}_tflop_per_s", flops / seconds / 1e12)


def check_head(bench: Bench, found: Findings) -> None:
    """Compare log-probs and gradients of the chunked head with float64; measure its peak memory and speed."""
    vocab_sizes = [1000] if bench.quick else [32_000, 151_936]
    lengths = [300] if bench.quick else [8192, 32_768] if bench.measures else [8192]
    hidden_size = 64 if bench.quick else 896
    for vocab_size in vocab_sizes:
        for num_tokens in lengths:
            for dtype in (torch.float32, torch.bfloat16):
                if dtype == torch.float32 and num_tokens > 8192:
                    continue
                torch.manual_seed(0)
                hidden = torch.randn(num_tokens, hidden_size, device=bench.device).to(dtype).requires_grad_()
                weight = (0.1 * torch.randn(vocab_size, hidden_size, device=bench.device)).requires_grad_()
                targets = torch.randint(vocab_size, (num_tokens,), device=bench.device)
                name = f"v{vocab_size}_t{num_tokens}_{_name(dtype)}"
                with found.part(name):
                    _check_head(bench, found, name, hidden, weight, targets)
    if bench.device == "cuda":
        with found.part("addmm_in_place"):
            _check_addmm(found)


def _check_head(bench: Bench, found: Findings, name: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    dtype = hidden.dtype
    grad = torch.linspace(-1, 1, len(targets), device=bench.device)
    chunk_bytes = 64 * 1024 if bench.quick else CHUNK_BYTES[bench.device]

    def both() -> list[Tensor]:
        with torch.autocast(bench.device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            values = head_logprobs(hidden, weight, None, targets, temperature=0.7, chunk_bytes=chunk_bytes)
        return [values.detach(), *torch.autograd.grad(values, [hidden, weight], grad)]

    if bench.device == "cuda":
        both()  # libraries take their workspaces
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = both()
        peak = torch.cuda.max_memory_allocated() - before
        logits = min(chunk_bytes, 4 * len(targets) * len(weight))
        narrow = dtype == torch.bfloat16
        # a chunk and its 16-bit copy; W in 16 bits, its gradient; the gradient of h
        promised = logits * (1.5 if narrow else 1) + weight.numel() * (6 if narrow else 4) + 2 * hidden.nbytes
        found.note(f"{name}_peak_mib", peak / 2**20)
        found.at_most(f"{name}_peak_by_bound", peak / promised, HEAD_PEAK_LIMIT)
    else:
        results = both()
    expected = _plain_head(hidden, weight, targets, grad)
    wide = dtype == torch.float32 or bench.device in logprobs.WIDE_PRODUCTS
    found.at_most(f"{name}_error_nats", float((results[0] - expected[0]).abs().max()), 1e-3 if wide else 0.05)
    found.at_most(f"{name}_dh_error", relative_error(results[1], expected[1]), GRADIENT_LIMIT[dtype])
    found.at_most(f"{name}_dw_error", relative_error(results[2], expected[2]), GRADIENT_LIMIT[dtype])
    if bench.measures:
        seconds = seconds_of(both, bench.device, rounds=3, warm_ups=1)
        found.note(f"{name}_ms", 1e3 * seconds)
        found.note(f"{name}_tflop_per_s", 8 * len(targets) * weight.numel() / seconds / 1e12)


def _plain_head(hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor) -> list[Tensor]:
    """Return log-probs and gradients in float64, of the same rounded inputs, in chunks of its own."""
    w = weight.detach().to(hidden.dtype).double()
    h = hidden.detach().double()
    values, grad_h, grad_w = [], [], torch.zeros_like(w)
    for start in range(0, len(h), 1024):
        rows = slice(start, start + 1024)
        table = (h[rows] @ w.t() / 0.7).log_softmax(1)  # [C, V]
        values.append(table.gather(1, targets[rows, None])[:, 0])
        one_hot = torch.zeros_like(table).scatter_(1, targets[rows, None], 1.0)
        of_logits = (one_hot - table.exp()) * (grad[rows, None].double() / 0.7)
        grad_h.append(of_logits @ w)
        grad_w += of_logits.t() @ h[rows]
    return [torch.cat(values), torch.cat(grad_h), grad_w]


def _check_addmm(found: Findings) -> None:
    """Ask whether torch adds a wide product of 16-bit matrices in place: the head's weight gradient needs it."""
    total = torch.ones(256, 128, device="cuda")
    left, right = (torch.randn(256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = total + left.float() @ right[:128].float()
    torch.addmm(total, left, right[:128], out_dtype=torch.float32, out=total)
    found.at_most("addmm_in_place_error", relative_error(total, expected), 1e-4)
    found.note("addmm_wide_sums", ",".join(sorted(logprobs.WIDE_PRODUCTS)))


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
