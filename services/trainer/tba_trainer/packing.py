"""Sequences one after another in one row, without padding: what every model pass of the trainer is given.

    row      0 0 0 0 0 1 1 1 2 2 2 2        a sequence is its prompt and its response less the last token:
    input    p p p r r p r r p p r r        nothing is predicted after that one
    position 0 1 2 3 4 0 1 2 0 1 2 3

Attention keeps the sequences apart (attention.py). Everything is built from lengths, never from pad ids: where pad and
end-of-sequence are one token, the end-of-sequence token stays inside the loss.

Shapes: B sequences, P positions of all of them, T response tokens of all of them, sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """B sequences of a model pass, and where in them the response tokens are predicted."""

    input_ids: Int[Tensor, "1 P"]
    position_ids: Int[Tensor, "1 P"]
    """Place within the own sequence, from 0."""
    lengths: tuple[int, ...]
    """[B] positions of each sequence."""
    response_lengths: tuple[int, ...]
    """[B] response tokens of each sequence."""
    predictors: Int[Tensor, " T"]
    """Position whose output predicts each response token; no two are the same."""
    response_tokens: Int[Tensor, " T"]
    row: Int[Tensor, " T"]
    """Which sequence each response token belongs to."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths)


def pack_sequences(
    prompts: Sequence[NDArray[np.int32]], responses: Sequence[NDArray[np.int32]], device: torch.device | str
) -> PackedSequences:
    """B prompts (at least 1 token each) with their responses (at least 1 token each), in the order given."""
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
    """The sum over each sequence's response tokens: the same bits in every company, on one device.

    Neighbours are added until one number is left. A wider table only adds zeros at the end of that, whereas the order
    in which `Tensor.sum` adds depends on the width, and that of a scatter-add on a GPU on chance.
    """
    columns = torch.from_numpy(_places(np.array(sequences.response_lengths))).to(values.device)
    width = 1 << (max(sequences.response_lengths) - 1).bit_length()  # the next power of 2
    table = values.new_full((sequences.num_rows, width), -0.0)  # x + -0.0 is x, also where x is -0.0
    table[sequences.row, columns] = values
    while table.shape[1] > 1:
        table = table[:, 0::2] + table[:, 1::2]  # [B, width] -> [B, width / 2]
    return table[:, 0]


def _places(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """0, 1, ... within each of several runs of these lengths."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
