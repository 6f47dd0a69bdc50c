"""Sequences one after another in one row, without padding: the input of every model pass of the trainer.

    sequence 0 0 0 0 0 1 1 2 2 2 2          a sequence is a prompt and its response without the last token, which
    input    p p p r r r r p p r r          predicts nothing; sequence 1 has the same prompt as sequence 0, and that
    position 0 1 2 3 4 3 4 0 1 2 3          prompt is stored once: its outputs do not depend on the response

A response begins with the first trained token and ends with the last one. What a conversation's environment wrote
between replies lies in it, and is predicted by nothing: it is an input of what follows.

The rollouts of a group share one prompt. Storing it once saves 60 % of the work in a group of 8 with prompts twice as
long as responses. The gradient of a shared position is the sum over its sequences.

Attention keeps the sequences apart; everything else runs on all tokens at once. transformers looks up a model's
attention function in a table by name, and passes it keyword arguments of the model's `forward`. That is how attention
receives the boundaries of the sequences, as `segments`. It first copies shared positions into every sequence:

* on CUDA in half precision, torch's variable-length flash attention takes the sequences without padding;
* otherwise sequences of about the same length form a bucket, are padded on the right to its longest, and run through
  scaled-dot-product attention. The causal mask already hides the padding on the right.

Model families whose attention cannot do that get right-padded rows (`padded_outputs`); sequences of about the same
length share a pass there. The choice is explained in docs/adr/0010-packing-and-the-output-head.md.

Shapes: B rollouts, S sequences (mostly one per rollout), R positions of all of them, sequence after sequence; P
positions of the row (R without the repeated prompts); T trained tokens, rollout after rollout. N heads (keys and values
may have fewer), D head dimension; Q = R plus padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from tba.errors import TbaError

PACKED_ATTENTION = "tba_packed"
"""Name of `packed_attention` in transformers' table of attention functions."""
PACKED_FAMILIES = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
"""`model_type` of the families whose packed outputs are tested to equal the padded ones. Others run padded."""
BUCKET_MIN_SHARE = 0.9
"""The shortest sequence of a bucket has at least this share of the length of its longest."""
FLASH_MAX_HEAD_DIM = 256
ALIGNED_ELEMENTS = 8
"""Attention masks and their rows begin at multiples of this number: 16 bytes in 16-bit dtypes, 32 bytes in float32."""
WINDOW_BLOCK = 1024
"""Largest number of queries of one block of windowed attention without flash attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """S sequences of a model pass, and the positions in them where trained tokens are predicted."""

    input_ids: Int[Tensor, "1 P"]
    position_ids: Int[Tensor, "1 P"]
    """Position within its sequence, from 0."""
    lengths: tuple[int, ...]
    """[S] positions of each sequence."""
    positions: NDArray[np.int64]
    """[R] the place in the row of each position of each sequence."""
    num_trained: tuple[int, ...]
    """[B] trained tokens of each rollout."""
    predictor_places: NDArray[np.int64]
    """[T] place in the row whose output predicts each trained token; `predictors` has them on the device."""
    predictors: Int[Tensor, " T"]
    trained_tokens: Int[Tensor, " T"]
    """Token ids, which the outputs at `predictors` are asked for."""
    row: Int[Tensor, " T"]
    """Rollout of each trained token."""

    @property
    def num_rows(self) -> int:
        """B, the number of rollouts."""
        return len(self.num_trained)


def pack_sequences(
    prompts: Sequence[NDArray[np.int32]],
    responses: Sequence[NDArray[np.int32]],
    device: torch.device | str,
    *,
    trained: Sequence[NDArray[np.bool_]] | None = None,
    rollouts: Sequence[int] | None = None,
) -> PackedSequences:
    """Pack S prompts and their responses in the given order.

    Args:
        prompts: S token sequences of at least 1 token each.
        responses: S token sequences of at least 1 token each; the last token is only predicted, never an input.
        device: device of the result.
        trained: for each response, which of its tokens are trained; at least the last one is. None: all tokens are.
        rollouts: the rollout of each sequence, ascending from 0; None: each sequence is a rollout of its own.
    """
    # built from lengths, never from pad ids: where pad and end-of-sequence are one token, the latter stays in the loss
    prompt_lengths, response_lengths = (np.array([len(part) for part in parts]) for parts in (prompts, responses))
    lengths = prompt_lengths + response_lengths - 1
    owners: dict[bytes, int] = {}  # prompt -> the first sequence with it
    owner = np.array([owners.setdefault(np.asarray(p, np.int32).tobytes(), b) for b, p in enumerate(prompts)])
    is_owner = owner == np.arange(len(owner))
    num_new = response_lengths - 1 + np.where(is_owner, prompt_lengths, 0)
    starts = num_new.cumsum() - num_new  # where the new positions of each sequence begin in the row
    columns = places_within(lengths)
    in_prompt = columns < np.repeat(prompt_lengths, lengths)
    first = np.repeat(starts - np.where(is_owner, 0, prompt_lengths), lengths)  # a shared prompt comes before the start
    positions = columns + np.where(in_prompt, np.repeat(starts[owner], lengths), first)
    parts = [part for b, r in enumerate(responses) for part in ((prompts[b], r[:-1]) if is_owner[b] else (r[:-1],))]
    is_new = ~in_prompt | np.repeat(is_owner, lengths)
    # the last prompt token predicts the first response token
    places = positions[
        np.repeat(lengths.cumsum() - response_lengths, response_lengths) + places_within(response_lengths)
    ]
    tokens = np.concatenate(responses)
    row = np.repeat(np.arange(len(lengths)) if rollouts is None else np.asarray(rollouts), response_lengths)
    if trained is not None:
        kept = np.concatenate(trained)
        places, tokens, row = places[kept], tokens[kept], row[kept]

    def tensor(values: NDArray[np.integer]) -> Tensor:
        return upload(torch.from_numpy(values.astype(np.int64)), device)

    return PackedSequences(
        input_ids=tensor(np.concatenate(parts)[None]),
        position_ids=tensor(columns[is_new][None]),
        lengths=tuple(lengths.tolist()),
        positions=positions,
        num_trained=tuple(np.bincount(row).tolist()),
        predictor_places=places,
        predictors=tensor(places),
        trained_tokens=tensor(tokens),
        row=tensor(row),
    )


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to a device asynchronously, after the work that is queued there; the host does not wait."""
    # from memory that is not pinned the copy would wait for the device
    on_cuda = torch.device(device).type == "cuda"
    return (values.pin_memory() if on_cuda else values).to(device, non_blocking=True)


def rollout_sums(values: Float[Tensor, " T"], sequences: PackedSequences) -> Float[Tensor, " B"]:
    """Return the sum over each rollout's trained tokens, with the same bits whatever else is in the batch."""
    # Neighbours are added until one number is left: a wider table only adds zeros at the end of that. `Tensor.sum` adds
    # in an order that depends on the width, and a scatter-add on a GPU in a random one.
    columns = upload(torch.from_numpy(places_within(np.array(sequences.num_trained))), values.device)
    width = 1 << (max(sequences.num_trained) - 1).bit_length()  # the next power of 2
    table = values.new_full((sequences.num_rows, width), -0.0)  # x + -0.0 is x, also where x is -0.0
    table[sequences.row, columns] = values
    while table.shape[1] > 1:
        table = table[:, 0::2] + table[:, 1::2]  # [B, width] -> [B, width / 2]
    return table[:, 0]


def places_within(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the positions 0, 1, ... of every sequence, one sequence after another."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


class RowSegments(Protocol):
    """Boundaries of sequences for attention: of a whole packed row, or of one process's part of it."""

    def attend(self, module: Any, rows: Sequence[Tensor], scaling: float | None, sliding_window: int | None) -> Tensor:
        """See `Segments.attend`."""
        ...


# not frozen: torch.compile before 2.13 looks into a frozen one, and compiles again for every number of buckets
@dataclass(slots=True, kw_only=True)
class Segments:
    """Where each sequence of a packed row lies, and its place in the buckets."""

    offsets: Int[Tensor, " S_plus_1"]
    """int32; sequence s has elements offsets[s] to offsets[s + 1] - 1 of `positions`."""
    longest: int
    positions: Int[Tensor, " R"]
    """The place in the row of each position of each sequence."""
    firsts: Int[Tensor, " P"]
    """For each place in the row, the first index of `positions` that holds it."""
    buckets: tuple[tuple[int, int], ...]
    """Number of rows and row length of each bucket; laid end to end, the buckets have Q places."""
    sources: Int[Tensor, " Q"]
    """For each place in the buckets, the place in the row that fills it. Padding repeats the last position of its
    sequence; the outputs of padding are dropped, so no gradient comes back through it."""
    places: Int[Tensor, " R"]
    """The place in the buckets of each position of each sequence."""

    def attend(
        self, module: Any, rows: Sequence[Tensor], scaling: float | None, sliding_window: int | None
    ) -> Float[Tensor, "P N D"]:
        """Return causal attention within each sequence.

        Args:
            module: the attention module of the model.
            rows: query, key and value of all positions [P, N, D], in the dtype of the product.
            scaling, sliding_window: as in `packed_attention`.
        """
        if has_flash(rows[0]):
            spread = [row.index_select(0, self.positions) for row in rows]  # [R, N, D] each
            both = (self.offsets, self.offsets), (self.longest, self.longest)
            return flash(spread, *both, scaling, sliding_window).index_select(0, self.firsts)
        sizes = [num_rows * width for num_rows, width in self.buckets]
        split = [row.index_select(0, self.sources).split(sizes) for row in rows]
        outs = []
        for (num_rows, width), *parts in zip(self.buckets, *split, strict=True):
            bucket = [part.unflatten(0, (num_rows, width)).transpose(1, 2) for part in parts]  # [b, N, L, D]
            out = attend_in_window(module, bucket, scaling, width if sliding_window is None else sliding_window)
            outs.append(out.flatten(0, 1))  # [b * L, N, D]
        return torch.cat(outs).index_select(0, self.places[self.firsts])


def find_segments(
    lengths: Sequence[int],
    device: torch.device | str,
    *,
    positions: NDArray[np.int64] | None = None,
    one_bucket: bool = False,
) -> Segments:
    """Return boundaries and buckets of sequences with these lengths.

    Args:
        lengths: at least 1 each, in the order in which the sequences are packed.
        device: device of the result.
        positions: [R] as in `PackedSequences`; None: the sequences share nothing.
        one_bucket: put all sequences into one bucket.
    """
    min_share = 0.0 if one_bucket else BUCKET_MIN_SHARE
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(offsets[-1]) if positions is None else positions
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets: list[list[int]] = []
    for i in order:
        if not buckets or lengths[i] < min_share * lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(i)
    widths = np.repeat([lengths[bucket[0]] for bucket in buckets], [len(bucket) for bucket in buckets])  # [B]
    starts = np.empty(len(lengths), dtype=np.int64)
    starts[order] = widths.cumsum() - widths
    columns = np.arange(widths.sum()) - np.repeat(starts[order], widths)  # [Q]
    in_order = np.array(lengths)[order]
    sources = np.repeat(offsets[order], widths) + np.minimum(columns, np.repeat(in_order, widths) - 1)
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return Segments(
        offsets=upload(torch.from_numpy(offsets.astype(np.int32)), device),
        longest=max(lengths),
        positions=upload(torch.from_numpy(positions), device),
        firsts=upload(torch.from_numpy(np.unique(positions, return_index=True)[1]), device),
        buckets=tuple((len(bucket), lengths[bucket[0]]) for bucket in buckets),
        sources=upload(torch.from_numpy(positions[sources]), device),
        places=upload(torch.from_numpy(places), device),
    )


Forward = Callable[[Int[Tensor, "b L"], Int[Tensor, "b L"], Int[Tensor, "b L"]], Float[Tensor, "b L X"]]
"""Maps token ids, attention mask and position ids of padded rows to a vector for every position."""


def padded_outputs(forward: Forward, sequences: PackedSequences, segments: Segments) -> Float[Tensor, "T X"]:
    """Return the outputs of `forward` at the predictor of every trained token, with one pass per bucket of `segments`.

    Padding is never read, because it comes after the end of its sequence.
    """
    ids = sequences.input_ids[0].index_select(0, segments.sources)  # [Q]
    real = torch.zeros_like(ids).index_fill(0, segments.places, 1)  # [Q]
    # [T]: the tokens of a bucket are neighbours; a shared position is read in the first sequence that has it
    wanted, order = segments.places[segments.firsts[sequences.predictors]].sort()
    ends = np.cumsum([num_rows * width for num_rows, width in segments.buckets])
    # one wait for the device, before the passes
    nums_taken = torch.searchsorted(wanted, upload(torch.from_numpy(ends), ids.device)).tolist()
    picked = []
    start = taken = 0
    for (num_rows, width), end, num_taken in zip(segments.buckets, ends.tolist(), nums_taken, strict=True):
        shape = (num_rows, width)
        positions = torch.arange(width, device=ids.device).expand(shape)
        outputs = forward(ids[start:end].view(shape), real[start:end].view(shape), positions)  # [b, L, X]
        picked.append(outputs.flatten(0, 1).index_select(0, wanted[taken:num_taken] - start))
        start, taken = end, num_taken
    return torch.cat(picked).index_select(0, order.argsort())


def use_packed_attention(model: Any) -> bool:
    """Make a model use `packed_attention`. Return False and change nothing if its family is not a tested one."""
    from transformers import AttentionInterface

    # code that came with a model may name a known family and still not look its attention up in the table
    if model.config.model_type not in PACKED_FAMILIES or not type(model).__module__.startswith("transformers."):
        return False
    # compile_layers registers a function that is not compiled, which has to stay for copies of the model too
    if PACKED_ATTENTION not in AttentionInterface():
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)
    return True


def packed_attention(
    module: Any,
    query: Float[Tensor, "1 N P D"],
    key: Float[Tensor, "1 M P D"],
    value: Float[Tensor, "1 M P D"],
    attention_mask: None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: RowSegments | None = None,
    **_kwargs: Any,
) -> tuple[Float[Tensor, "1 P N D"], None]:
    """Return causal attention within the segments of one packed row; transformers calls this function.

    Args:
        scaling: factor of query times key; None: 1 / sqrt(D).
        sliding_window: positions that a position attends to, itself included; None: all up to itself.
        segments: boundaries of the sequences; None: the row is one sequence.

    Raises:
        TbaError: the call is not a pass over one packed row, but for example generation.
    """
    if query.shape[0] != 1 or query.shape[2] != key.shape[2] or dropout > 0.0 or attention_mask is not None:
        raise TbaError(
            f"{PACKED_ATTENTION!r} attention got query {list(query.shape)}, key {list(key.shape)}, dropout {dropout}: "
            "it is for passes over one packed row; call model.set_attn_implementation('sdpa') for anything else"
        )
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    # up to 512 positions, the backward pass of torch's bfloat16 kernel takes twice as long on a CPU
    inner = torch.float32 if kind == "cpu" and dtype == torch.bfloat16 else dtype
    rows = [tensor[0].transpose(0, 1).to(inner) for tensor in (query, key, value)]  # [P, N, D] each
    segments = segments or find_segments([query.shape[2]], query.device)
    with torch.autocast(kind, enabled=False):  # it would cast again
        out = segments.attend(module, rows, scaling, sliding_window)
    return out[None].to(dtype), None  # [1, P, N, D]


def has_flash(query: Float[Tensor, "R N D"]) -> bool:
    """Return whether variable-length flash attention supports the query's device, dtype and head dimension."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and is_half and query.shape[-1] <= FLASH_MAX_HEAD_DIM


def flash(
    rows: Sequence[Tensor],
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float | None,
    sliding_window: int | None,
) -> Float[Tensor, "R N D"]:
    """Return causal flash attention within several sequences; the queries may be only the last positions of each.

    Args:
        rows: queries [R, N, D], keys and values, sequence after sequence.
        offsets: where each sequence begins among the queries, and among the keys.
        longest: the largest number of queries, and of keys, of one sequence.
        scaling, sliding_window: as in `packed_attention`.
    """
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = rows
    # before torch 2.12 there is no such flag: fewer heads of keys are taken as they come
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if has_flag else {}
    out = varlen_attn(
        query,
        key,
        value,
        *offsets,
        *longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


def _aligned(num: int) -> int:
    return -(-num // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def attend_in_window(module: Any, bucket: Sequence[Tensor], scaling: float | None, window: int) -> Tensor:
    """Return [b, C, N, D]: attention of each of the last C positions to the `window` positions that end with itself.

    Args:
        bucket: queries [b, N, C, D] of the last positions; keys and values of all L positions.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value = bucket
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == num_keys <= window:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)[0]
    # in blocks of queries: a mask of all pairs would grow with the square of the length. One mask, of the keys from
    # `window` before a block to its end, serves all blocks
    window, before = min(window, num_keys), num_keys - num_queries
    num = min(_aligned(window), num_queries, WINDOW_BLOCK)
    # Torch's memory-efficient kernel takes a mask that begins anywhere in memory, and its backward pass then fails on a
    # card. So some keys more come along, hidden: masks and their rows begin at multiples of 16 bytes
    reach = window + (before - window) % ALIGNED_ELEMENTS
    visible = torch.ones(num, _aligned(num + reach), dtype=torch.bool, device=query.device)
    visible = visible.triu(1 + reach - window).tril(reach)
    band = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill(~visible, -torch.inf)
    outs = []
    for start in range(before, num_keys, num):
        first, end = max(0, start - reach), min(start + num, num_keys)
        mask = band[: end - start, first - start + reach : end - start + reach]
        queries, keys = slice(start - before, end - before), slice(first, end)
        out, _ = sdpa_attention_forward(
            module, query[:, :, queries], key[:, :, keys], value[:, :, keys], mask[None, None], scaling=scaling
        )
        outs.append(out)  # [b, up to `num`, N, D]
    return torch.cat(outs, dim=1)
