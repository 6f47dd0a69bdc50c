"""Micro-batches: which rollouts go through the model together, and their padded tensors.

Masks are built from lengths, never from pad ids: where pad and end-of-sequence are one token, the end-of-sequence
token stays inside the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

FILLER_TOKEN = 0
"""Token id in padded places; the attention mask and the response mask keep it out of every result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rollouts of one forward and backward pass, as positions in the batch."""

    indices: tuple[int, ...]
    whole_groups: bool
    """True when every group in it is complete, so that one forward pass gives its statistics."""


def plan_micro_batches(lengths: Sequence[int], groups: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """Pack groups of similar length, longest first, so that rows times longest row stays within `max_tokens`.

    A group stays in one micro-batch where it fits: then its statistics need no extra forward pass. A group that does
    not fit is split by length. A single rollout longer than `max_tokens` gets a micro-batch of its own.

    Args:
        lengths: [N] prompt plus response tokens.
        groups: [N] group number of each rollout.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    longest = {group: max(lengths[i] for i in indices) for group, indices in members.items()}
    plans: list[MicroBatch] = []
    packed: list[int] = []
    width = 0
    for group in sorted(members, key=lambda g: (-longest[g], members[g][0])):
        indices = members[group]
        if len(indices) * longest[group] > max_tokens:
            plans.extend(
                MicroBatch(indices=rows, whole_groups=len(rows) == len(indices))
                for rows in plan_rows([lengths[i] for i in indices], max_tokens, indices)
            )
            continue
        if packed and (len(packed) + len(indices)) * width > max_tokens:
            plans.append(MicroBatch(indices=tuple(packed), whole_groups=True))
            packed = []
        width = longest[group] if not packed else width
        packed.extend(indices)
    if packed:
        plans.append(MicroBatch(indices=tuple(packed), whole_groups=True))
    return plans


def plan_rows(lengths: Sequence[int], max_tokens: int, names: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Rows sorted by length, longest first, cut so that rows times longest row stays within `max_tokens`.

    Args:
        names: [N] what to call the rows; default 0 to N - 1.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cuts: list[list[int]] = []
    width = 0
    for i in order:
        if not cuts or (len(cuts[-1]) + 1) * width > max_tokens:
            cuts.append([])
            width = lengths[i]
        cuts[-1].append(i if names is None else names[i])
    return [tuple(cut) for cut in cuts]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSequences:
    """B sequences, padded on the right. T is the longest sequence less one: nothing is predicted after its end."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Int[Tensor, "B T"]
    position_ids: Int[Tensor, "B T"]
    predictors: Int[Tensor, "B R"]
    """Column of `input_ids` whose output predicts each response token (0 where `mask` is false)."""
    response_tokens: Int[Tensor, "B R"]
    mask: Bool[Tensor, "B R"]
    """True at response tokens."""


def pad_sequences(
    prompts: Sequence[NDArray[np.int32]], responses: Sequence[NDArray[np.int32]], device: torch.device | str
) -> PaddedSequences:
    """Padded tensors of B prompts (P >= 1 tokens each) with their responses (R >= 1 tokens each)."""
    num_rows = len(prompts)
    lengths = np.array([len(p) + len(r) - 1 for p, r in zip(prompts, responses, strict=True)])
    response_lengths = np.array([len(r) for r in responses])
    columns, response_columns = np.arange(lengths.max()), np.arange(response_lengths.max())
    input_ids = np.full((num_rows, len(columns)), FILLER_TOKEN, dtype=np.int64)
    response_tokens = np.full((num_rows, len(response_columns)), FILLER_TOKEN, dtype=np.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        input_ids[row, : lengths[row]] = np.concatenate([prompt, response[:-1]])
        response_tokens[row, : len(response)] = response
    mask = response_columns[None, :] < response_lengths[:, None]
    first = (lengths - response_lengths)[:, None]  # the last prompt token predicts the first response token
    return PaddedSequences(
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=torch.from_numpy((columns[None, :] < lengths[:, None]).astype(np.int64)).to(device),
        position_ids=torch.from_numpy(np.tile(columns, (num_rows, 1))).to(device),
        predictors=torch.from_numpy(np.where(mask, first + response_columns[None, :], 0)).to(device),
        response_tokens=torch.from_numpy(response_tokens).to(device),
        mask=torch.from_numpy(mask).to(device),
    )


def pad_values(values: Sequence[NDArray[np.float32]], num_columns: int, device: torch.device | str) -> Tensor:
    """float32 [B, num_columns] with zeros on the right."""
    padded = np.zeros((len(values), num_columns), dtype=np.float32)
    for row, value in enumerate(values):
        padded[row, : len(value)] = value
    return torch.from_numpy(padded).to(device)
