"""Sequences one after another in one row, without padding: the input of every model pass of the trainer.

    row      0 0 0 0 0 1 1 1 2 2 2 2        a sequence is its prompt and its response without the last token,
    input    p p p r r p r r p p r r        after which nothing is predicted
    position 0 1 2 3 4 0 1 2 0 1 2 3

Attention keeps the sequences apart (attention.py). Model families whose attention cannot do that get right-padded rows
(`padded_outputs`); sequences of about the same length share a pass there.

Shapes: B sequences, P positions of all of them, T response tokens of all of them, sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from tba_trainer.model.attention import Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """B sequences of a model pass, and the positions in them where response tokens are predicted."""

    input_ids: Int[Tensor, "1 P"]
    position_ids: Int[Tensor, "1 P"]
    """Position within its sequence, from 0."""
    lengths: tuple[int, ...]
    """[B] positions of each sequence."""
    response_lengths: tuple[int, ...]
    """[B] response tokens of each sequence."""
    predictors: Int[Tensor, " T"]
    """Position whose output predicts each response token; all are different."""
    response_tokens: Int[Tensor, " T"]
    row: Int[Tensor, " T"]
    """Sequence of each response token."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths)


def pack_sequences(
    prompts: Sequence[NDArray[np.int32]], responses: Sequence[NDArray[np.int32]], device: torch.device | str
) -> PackedSequences:
    """Pack B prompts and their responses (at least 1 token each), in the given order."""
    # built from lengths, never from pad ids: where pad and end-of-sequence are one token, the latter stays in the loss
    pairs = list(zip(prompts, responses, strict=True))
    lengths = np.array([len(prompt) + len(response) - 1 for prompt, response in pairs])
    response_lengths = np.array([len(response) for response in responses])
    ends = lengths.cumsum()
    input_ids = np.concatenate([part for prompt, response in pairs for part in (prompt, response[:-1])])
    # the last prompt token predicts the first response token
    starts = np.repeat(ends - response_lengths, response_lengths)  # [T]

    def tensor(values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return PackedSequences(
        input_ids=tensor(input_ids[None]),
        position_ids=tensor((np.arange(ends[-1]) - np.repeat(ends - lengths, lengths))[None]),
        lengths=tuple(lengths.tolist()),
        response_lengths=tuple(response_lengths.tolist()),
        predictors=tensor(starts + _places(response_lengths)),
        response_tokens=tensor(np.concatenate(responses)),
        row=tensor(np.repeat(np.arange(len(pairs)), response_lengths)),
    )


def response_sums(values: Float[Tensor, " T"], sequences: PackedSequences) -> Float[Tensor, " B"]:
    """Return the sum over each sequence's response tokens: on one device the same bits in every batch."""
    # Neighbours are added until one number is left: a wider table only adds zeros at the end of that. `Tensor.sum` adds
    # in an order that depends on the width, and a scatter-add on a GPU in a random one.
    columns = torch.from_numpy(_places(np.array(sequences.response_lengths))).to(values.device)
    width = 1 << (max(sequences.response_lengths) - 1).bit_length()  # the next power of 2
    table = values.new_full((sequences.num_rows, width), -0.0)  # x + -0.0 is x, also where x is -0.0
    table[sequences.row, columns] = values
    while table.shape[1] > 1:
        table = table[:, 0::2] + table[:, 1::2]  # [B, width] -> [B, width / 2]
    return table[:, 0]


def _places(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return 0, 1, ... within each of several sequences of these lengths."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


Forward = Callable[[Int[Tensor, "b L"], Int[Tensor, "b L"], Int[Tensor, "b L"]], Float[Tensor, "b L X"]]
"""Maps token ids, attention mask and position ids of padded rows to a vector for every position."""


def padded_outputs(forward: Forward, sequences: PackedSequences, segments: Segments) -> Float[Tensor, "T X"]:
    """Return the outputs of `forward` at the predictor of every response token, with one pass per bucket of `segments`.

    Padding is never read, because it comes after the end of its sequence.
    """
    ids = sequences.input_ids[0].index_select(0, segments.sources)  # [Q]
    real = torch.zeros_like(ids).index_fill(0, segments.places, 1)  # [Q]
    wanted, order = segments.places[sequences.predictors].sort()  # [T]: the tokens of a bucket are neighbours
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
