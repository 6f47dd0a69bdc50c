"""Context parallelism: the C processes of a context group share every sequence of a pass.

    pieces of a sequence, C = 2      0 | 1 | 2 | 3
    process                          0 | 1 | 1 | 0          the last pieces cost the most attention, the first the least

Every sequence is cut into 2 C pieces, and each process computes two of them in every layer and in the output head. Only
attention needs more: each layer gathers the keys and values of all processes, and a query attends to all keys up to its
own position. At the end the log-probs of all trained tokens are summed into every process, so each computes the loss
of the whole micro-batch. Its backward pass goes through its own positions alone, because gradients are summed over the
processes anyway. Only a model's passes know of context groups; docs/adr/0048-context-parallelism.md says why.

Shapes: P positions of the packed row, W of them here (padded to the same number in each process), T trained tokens of
the row, t of them predicted here, K keys of all pieces together, N heads, M key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from tba.errors import ConfigError
from tba_trainer.model.packing import PackedSequences, attend_in_window, flash, has_flash, places_within, upload

_CONTEXT = "_tba_context"
"""Key of a model's `__dict__` under which its context group is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """The part of a packed row that one process of a context group computes."""

    input_ids: Int[Tensor, "1 W"]
    position_ids: Int[Tensor, "1 W"]
    predictors: Int[Tensor, " t"]
    """For each of the t trained tokens here, the index among the W positions of the position that predicts it."""
    trained_tokens: Int[Tensor, " t"]
    tokens: Int[Tensor, " t"]
    """Index of each of these t trained tokens among the T of the row."""
    num_tokens: int
    """T, of the whole row."""
    chosen: Int[Tensor, " c"]
    """Indices, among the t trained tokens, of those that were `chosen` in `Context.part_of`."""
    segments: PartSegments


# not frozen: see `Segments`
@dataclass(slots=True, kw_only=True)
class PartSegments:
    """The pieces of sequences that one process has, as attention needs them."""

    group: Any
    sizes: tuple[tuple[int, int], ...]
    """For each piece the number of its queries, and the number of keys that its last query attends to."""
    offsets: tuple[Int[Tensor, " n_plus_1"], Int[Tensor, " n_plus_1"]]
    """int32: where each piece begins among the queries, and where its keys begin among the K keys."""
    sources: Int[Tensor, " two_K"]
    """Index of each of the K keys, then of each of the K values, among the gathered rows of all processes."""

    def attend(
        self, module: Any, rows: Sequence[Tensor], scaling: float | None, sliding_window: int | None
    ) -> Float[Tensor, "W N D"]:
        """Attend as `Segments.attend` does, to keys gathered from all processes of the group (a collective)."""
        query, key, value = rows
        gathered = _Gather.apply(torch.cat((key, value)), self.group)  # [C * 2 W, M, D]
        assert isinstance(gathered, Tensor)
        nums, num_seen = zip(*self.sizes, strict=True)
        parts = [query[: sum(nums)], *gathered.index_select(0, self.sources).chunk(2)]  # [K, M, D] each
        if has_flash(query):
            out = flash(parts, self.offsets, (max(nums), max(num_seen)), scaling, sliding_window)
        else:
            split = [part.split(each) for part, each in zip(parts, (nums, num_seen, num_seen), strict=True)]
            pieces = [[part.transpose(0, 1)[None] for part in piece] for piece in zip(*split, strict=True)]
            window = max(num_seen) if sliding_window is None else sliding_window
            out = torch.cat([attend_in_window(module, piece, scaling, window)[0] for piece in pieces])
        # nobody reads the outputs of padding
        return torch.cat((out, out.new_zeros(len(query) - len(out), *out.shape[1:])))


@dataclass(frozen=True, slots=True)
class Context:
    """A context group, seen from one of its processes."""

    group: Any
    """Process group of torch.distributed."""

    @classmethod
    def join(cls, size: int, *, deadline: timedelta | None = None) -> Context | None:
        """Create the groups of `size` consecutive ranks; return the group of this process, or None if `size` is 1.

        A collective: every process must call it.

        Args:
            deadline: timeout of every collective of the group; None: torch's default.
        """
        if size == 1:
            return None
        ranks = torch.arange(dist.get_world_size()).view(-1, size).tolist()
        return cls(dist.new_subgroups_by_enumeration(ranks, timeout=deadline)[0])

    @property
    def size(self) -> int:
        """C, the number of processes of the group."""
        return int(self.group.size())

    @property
    def rank(self) -> int:
        """Rank of this process within the group, from 0."""
        return int(self.group.rank())

    def part_of(self, sequences: PackedSequences, *, chosen: NDArray[np.int64] | None = None) -> RowPart:
        """Return this process's part of a packed row. All processes of the group pass the same row.

        Args:
            chosen: indices of some of the T trained tokens; `RowPart.chosen` then has those that are predicted here.
        """
        dealt = _deal(np.array(sequences.lengths), sequences.positions, self.size)
        width, device = max(1, *(len(places) for places, _, _ in dealt)), sequences.input_ids.device
        at = np.empty(sum(len(places) for places, _, _ in dealt), dtype=np.int64)  # [P] where each is among the C * W
        for rank, (places, _, _) in enumerate(dealt):
            at[places] = rank * width + np.arange(len(places))
        places, sizes, first_keys = dealt[self.rank]
        if not len(places):  # a pass without a position is none: this one's output goes nowhere
            places, sizes, first_keys = np.zeros(1, np.int64), np.ones((1, 2), np.int64), np.zeros(1, np.int64)
        num_seen = sizes[:, 1]
        keys = at[sequences.positions[np.repeat(first_keys, num_seen) + places_within(num_seen)]]  # [K]
        sources = keys + keys // width * width  # of each process W keys, then W values
        predictors = at[sequences.predictor_places]  # [T]
        tokens = np.flatnonzero(predictors // width == self.rank)
        asked = np.flatnonzero(np.isin(tokens, [] if chosen is None else chosen))

        def tensor(values: NDArray[np.integer]) -> Tensor:
            return upload(torch.from_numpy(values), device)

        here = tensor(np.concatenate([places, np.zeros(width - len(places), np.int64)]))
        on_device = tensor(tokens)
        offsets = np.concatenate([np.zeros((1, 2), np.int64), sizes.cumsum(axis=0)]).astype(np.int32)
        return RowPart(
            input_ids=sequences.input_ids.index_select(1, here),
            position_ids=sequences.position_ids.index_select(1, here),
            predictors=tensor(predictors[tokens] - self.rank * width),
            trained_tokens=sequences.trained_tokens.index_select(0, on_device),
            tokens=on_device,
            num_tokens=len(predictors),
            chosen=tensor(asked),
            segments=PartSegments(
                group=self.group,
                sizes=tuple((int(num), int(seen)) for num, seen in sizes),
                offsets=(tensor(offsets[:, 0].copy()), tensor(offsets[:, 1].copy())),
                sources=tensor(np.concatenate([sources, sources + width])),
            ),
        )

    def whole(self, values: Float[Tensor, " t"], part: RowPart) -> Float[Tensor, " T"]:
        """Return in every process the values of all T trained tokens (a collective; the backward pass is local)."""
        whole = _Whole.apply(values, part.tokens, part.num_tokens, self.group)
        assert isinstance(whole, Tensor)
        return whole

    def sum(self, value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Sum a value over the group in place (a collective, without gradient), and return it."""
        dist.all_reduce(value, group=self.group)
        return value


def check_context(model: Any, size: int, *, is_packed: bool) -> None:
    """Raise ConfigError where the passes of a model cannot be shared by a context group of `size` processes."""
    kind, found = model.config.model_type, None
    if not is_packed:
        found = f"models of type {kind!r} run over padded rows, and only packed sequences can be cut"
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        if isinstance(rope, str) and ("dynamic" in rope or rope == "longrope"):
            found = f"rotary embeddings of type {rope!r} depend on the longest sequence, of which a process has a part"
    if found is not None:
        raise ConfigError(f"trainer.sharding.context is {size}: {found}; set it to 1 (docs/trainer.md, Long sequences)")


def context_of(model: Any) -> Context | None:
    """Return the context group that shares each pass of a model, or None if every process makes passes of its own."""
    return model.__dict__.get(_CONTEXT)


def set_context(model: Any, context: Context | None) -> None:
    """Let a context group share each pass of a model."""
    model.__dict__[_CONTEXT] = context


_Dealt = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Part of one process: the places in the row that it computes. Then, for its n non-empty pieces: [n, 2] the numbers of
queries, and of keys that the last one sees; [n] the index in `PackedSequences.positions` where its sequence begins."""


def _deal(lengths: NDArray[np.int64], positions: NDArray[np.int64], num_ranks: int) -> list[_Dealt]:
    """Return each process's part: two of the 2 C pieces of every sequence, without places of earlier sequences."""
    starts = lengths.cumsum() - lengths  # [B]
    # a sequence adds its places to the end of the row, so the highest place so far says how many it adds
    num_new = np.diff(np.maximum.accumulate(np.maximum.reduceat(positions, starts)), prepend=-1)  # [B]
    ranks, num_pieces = np.arange(num_ranks), 2 * num_ranks
    # what a length leaves over goes to one process after another, where the sequence before has stopped
    size, left = np.divmod(num_new, num_pieces)  # [B]
    after = left.cumsum()[:, None] - 1 - ranks
    more = after // num_ranks - (after - left[:, None]) // num_ranks  # [B, C] 0, 1 or 2
    nums = size[:, None] + np.concatenate([more > 0, (more > 1)[:, ::-1]], axis=1)  # [B, 2 C] positions of each piece
    edges = np.concatenate([np.zeros((len(nums), 1), np.int64), nums.cumsum(axis=1)], axis=1)  # [B, 2 C + 1]
    first_places = (num_new.cumsum() - num_new)[:, None] + edges  # [B, 2 C + 1]
    num_seen = (lengths - num_new)[:, None] + edges  # [B, 2 C + 1]
    dealt: list[_Dealt] = []
    for rank in range(num_ranks):
        pieces = [rank, num_pieces - 1 - rank]
        own = nums[:, pieces].flatten()  # [2 B]
        places = np.repeat(first_places[:, pieces].flatten(), own) + places_within(own)
        sizes = np.stack([own, num_seen[:, 1:][:, pieces].flatten()], axis=1)
        dealt.append((places, sizes[own > 0], np.repeat(starts, 2)[own > 0]))
    return dealt


class _Gather(torch.autograd.Function):
    """Gather the rows of all processes in order of rank; the gradient of a row is the sum over all processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
        dist.all_gather_single(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()  # as all sums over processes
        own = wide.new_empty(len(wide) // ctx.group.size(), *wide.shape[1:])
        dist.reduce_scatter_single(own, wide, group=ctx.group)
        return own.to(grad.dtype), None


class _Whole(torch.autograd.Function):
    """See `Context.whole`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, num_tokens: int, group: Any) -> Tensor:
        ctx.save_for_backward(tokens)
        whole = values.new_zeros(num_tokens).index_copy_(0, tokens, values)
        dist.all_reduce(whole, group=group)  # each token is in one process: the others add 0
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        # every process computes the same loss: what it says of a token counts where the token is
        return grad.index_select(0, tokens), None, None, None
