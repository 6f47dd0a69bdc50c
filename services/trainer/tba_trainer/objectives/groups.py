"""Statistics per group. Group numbers are any integers; the order of the rollouts is of no account."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def group_mean(
    values: Float[Tensor, " N"], group: Int[Tensor, " N"], where: Bool[Tensor, " N"] | None = None
) -> Float[Tensor, " N"]:
    """The mean of each rollout's group, over the members where `where` holds (0 for a group with none)."""
    index, num_groups = _numbered(group)
    weight = torch.ones_like(values) if where is None else where.to(values.dtype)
    total = values.new_zeros(num_groups).index_add(0, index, values * weight)
    count = values.new_zeros(num_groups).index_add(0, index, weight)
    return (total / count.clamp(min=1.0))[index]


def group_size(values: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """How many rollouts each rollout's group has, in the dtype of `values`."""
    index, num_groups = _numbered(group)
    return values.new_zeros(num_groups).index_add(0, index, torch.ones_like(values))[index]


def group_extremes(
    values: Float[Tensor, " N"], group: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """The lowest and the highest value of each rollout's group."""
    index, num_groups = _numbered(group)
    lowest = values.new_zeros(num_groups).scatter_reduce(0, index, values, "amin", include_self=False)
    highest = values.new_zeros(num_groups).scatter_reduce(0, index, values, "amax", include_self=False)
    return lowest[index], highest[index]


def group_grid(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Row and column of each rollout in a grid with one row per group and one column per member."""
    index, num_groups = _numbered(group)
    order = index.argsort(stable=True)
    sizes = torch.bincount(index, minlength=num_groups)
    first = sizes.cumsum(0) - sizes
    column = torch.empty_like(index)
    column[order] = torch.arange(len(index), device=index.device) - first[index[order]]
    return index, column


def tied_group_share(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> float:
    """Share of groups whose rewards are all equal: they teach (nearly) nothing."""
    if not len(reward):
        return 0.0
    lowest, highest = group_extremes(reward, group)
    tied = (lowest == highest).to(torch.float64) / group_size(reward, group)
    return float(tied.sum() / _numbered(group)[1])


def _numbered(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], int]:
    """Group numbers 0 to num_groups - 1, and num_groups."""
    values, index = group.unique(return_inverse=True)
    return index, len(values)
