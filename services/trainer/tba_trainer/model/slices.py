"""Rows of tensors that one process of a sharded model holds, writes to a checkpoint and reads from one.

FSDP2 cuts every parameter by rows, as `torch.chunk` does: process i of n holds ceil(rows / n) rows from row
i * ceil(rows / n) on; the last processes may hold fewer rows or none. Tensors that are not sharded are the same in all
processes, and the first process writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tba_trainer.model.host_memory import host_copy, host_copy_bytes


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlice:
    """Rows of a tensor, on the CPU."""

    tensor: Tensor
    """[R, ...]: rows `begin` to `begin` + R - 1; a tensor without dimensions counts as one row."""
    begin: int
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.begin + num_rows(self.tensor.shape)

    @property
    def whole(self) -> Tensor:
        """The whole tensor; ValueError if some of its rows are not here."""
        if tuple(self.tensor.shape) != self.shape:
            raise ValueError(f"rows {self.begin} to {self.end} are not a whole tensor of shape {list(self.shape)}")
        return self.tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """An iterable of (section, name, rows) of all that a process writes; each iteration copies the rows anew."""

    copies: Callable[[], Iterator[tuple[str, str, TensorSlice]]]
    num_bytes: int
    """Largest number of bytes of memory that all copies take together."""

    def __iter__(self) -> Iterator[tuple[str, str, TensorSlice]]:
        return self.copies()


def num_rows(shape: Sequence[int]) -> int:
    """Return how many rows a tensor of this shape has; 1 without dimensions."""
    return shape[0] if len(shape) else 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How tensors are sharded over the processes of a team; by default there is one process with whole tensors."""

    index: int = 0
    num: int = 1
    """Number of processes."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of tensors that are all sharded alike, or not at all."""
        sharded = next((each for each in tensors.values() if isinstance(each, DTensor)), None)
        if sharded is None:
            return cls()
        if tuple(sharded.placements) != (Shard(0),):
            raise ValueError(f"a tensor is sharded by {sharded.placements}; checkpoints know rows alone")
        return cls(sharded.device_mesh.get_local_rank(), sharded.device_mesh.size())

    def rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the first row that this process holds of a sharded tensor, and the row after its last."""
        size = -(-num_rows(shape) // self.num)
        return min(self.index * size, num_rows(shape)), min((self.index + 1) * size, num_rows(shape))


def written_slices(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[tuple[str, TensorSlice]]:
    """Yield name and rows of each tensor that this process writes, copied to the CPU one at a time. Nothing is sent."""
    for name, rows, begin, shape in _written(tensors, layout):
        yield name, TensorSlice(host_copy(rows), begin, shape)


def written_bytes(tensors: Mapping[str, Tensor], layout: Layout) -> int:
    """Return how many bytes of memory the copies of `written_slices` take at most, all together."""
    return sum(host_copy_bytes(rows) for _, rows, _, _ in _written(tensors, layout))


def _written(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[tuple[str, Tensor, int, tuple[int, ...]]]:
    """Yield name, rows on the device, index of the first row, and whole shape of each tensor that is written here."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            if layout.index == 0:
                yield name, tensor, 0, shape
            continue
        begin, end = layout.rows(shape)
        # a tensor without rows is written by the first, so that it is in the checkpoint
        if begin < end or (layout.index == 0 and num_rows(shape) == 0):
            local = tensor.to_local()
            if num_rows(local.shape) != end - begin:
                raise ValueError(f"{name} has {num_rows(local.shape)} rows here, not rows {begin} to {end}")
            yield name, local, begin, shape
