"""Keys and values of all slots in one tensor, as a transformers `Cache` (model code stays untouched).

    row 0 .. num_slots - 1           rows being decoded, kept without gaps by the engine
    row num_slots .. num_rows - 1    keys and values of prompts, copied into slots (a visit samples one prompt S times)

A position beyond a row's own length may hold anything finite: the attention mask excludes it, and the row overwrites
it before it is ever attended to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Plan:
    """Where the next forward pass writes: set by the cache, read by its layers."""

    rows: Tensor
    """Of a prefill: the rows that it fills."""
    places: Tensor | None = None
    """Of a decoding step: where each row's and head's new position is in the flat tensor of a layer; [N * heads]."""
    length: int = 0


class _SlotLayer(CacheLayerMixin):
    """One layer's view of the shared tensor."""

    is_sliding = False

    def __init__(self, kv: Tensor, plan: _Plan) -> None:
        super().__init__()
        self.keys, self.values = kv[0], kv[1]
        self.is_initialized = True
        self._plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensor exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [N, heads, Q, dim]; return those that the queries may attend to."""
        plan, length = self._plan, key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        if plan.places is None:  # prefill: rows start at 0 and attend to nothing but themselves
            self.keys[plan.rows, :, :length] = key_states
            self.values[plan.rows, :, :length] = value_states
            return key_states, value_states
        num_rows, _, _, head_dim = key_states.shape  # decode: rows 0..N-1, one new position each
        self.keys.view(-1, head_dim).index_copy_(0, plan.places, key_states.reshape(-1, head_dim))
        self.values.view(-1, head_dim).index_copy_(0, plan.places, value_states.reshape(-1, head_dim))
        return self.keys[:num_rows, :, : plan.length], self.values[:num_rows, :, : plan.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Only asked for in prefill, where keys are the queries' own."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: positions are always given, never inferred."""
        return 0

    def get_max_length(self) -> int:
        """Positions per row."""
        assert self.keys is not None
        return self.keys.shape[2]


class SlotCache(Cache):
    """A static key-value cache with one length per row.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        num_rows: slots plus prompt rows.
        max_len: positions per row.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_rows, num_kv_heads, max_len, head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=device)
        self._plan = _Plan()
        super().__init__(layers=[_SlotLayer(layer, self._plan) for layer in self._kv])

    def plan_prefill(self, rows: Tensor) -> None:
        """The next forward pass fills rows `rows` (int64 [N]) from position 0."""
        self._plan.rows, self._plan.places = rows, None

    def plan_decode(self, positions: Tensor, length: int) -> None:
        """The next forward pass adds one token at `positions` (int64 [N]) to rows 0..N-1, none beyond `length`."""
        num_heads, max_len = self._kv.shape[3], self._kv.shape[4]
        lines = torch.arange(len(positions) * num_heads, device=positions.device).view(-1, num_heads)
        self._plan.places, self._plan.length = (lines * max_len + positions[:, None]).flatten(), length

    def copy_rows(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy positions [0, length) of rows `source` to rows `target` (int64 [N] each, no row in both)."""
        if length:
            self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]
