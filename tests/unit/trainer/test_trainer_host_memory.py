"""Memory of the host: how much is free, what happens where there is none, and where a checkpoint is copied to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tba_trainer.checkpoints import parts
from tba_trainer.checkpoints.checkpoint import CheckpointStore
from tba_trainer.checkpoints.parts import Part
from tba_trainer.model import parameters
from tba_trainer.model.host_memory import HostMemoryError, counts, free_bytes, host_copy, host_copy_bytes
from tba_trainer.model.slices import Layout, Rows, TensorSlice, written_bytes, written_slices
from torch.utils._python_dispatch import TorchDispatchMode

from tba.store import FileStore
from tba.versions import PolicyVersion

MIB = 1024**2


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU. Without one torch refuses pinned memory, as where there is none left."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 100 MiB available, and the process in group /pod/container of either version."""
    write(tmp_path / "proc" / "meminfo", "MemTotal:  999999 kB\nMemAvailable:  102400 kB\nBuffers:  7 kB\n")
    write(tmp_path / "proc" / "self" / "cgroup", "5:cpu,cpuacct:/\n4:memory:/pod/container\n0::/pod/container\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(
    folder: Path, *, limit: str, used_mib: int, files_mib: int, old: bool = False, high: str | None = None
) -> None:
    if high is not None:
        write(folder / "memory.high", f"{high}\n")
    write(folder / ("memory.limit_in_bytes" if old else "memory.max"), f"{limit}\n")
    write(folder / ("memory.usage_in_bytes" if old else "memory.current"), f"{used_mib * MIB}\n")
    name = "total_inactive_file" if old else "inactive_file"
    write(folder / "memory.stat", f"anon 5\n{name} {files_mib * MIB}\nshmem 0\n")


def free_mib(machine: Path) -> float:
    found = free_bytes(proc=machine / "proc", cgroups=machine / "cgroup")
    assert found is not None
    return found / MIB


def test_free_memory_is_the_least_of_the_machine_s_and_its_groups(machine: Path) -> None:
    assert free_mib(machine) == 100
    groups = machine / "cgroup"
    group(groups / "pod" / "container", limit="max", used_mib=10, files_mib=0)
    assert free_mib(machine) == 100
    group(groups / "pod", limit=str(80 * MIB), used_mib=70, files_mib=20)  # 20 of the 70 go when memory is needed
    assert free_mib(machine) == 30
    group(groups / "pod", limit="max", used_mib=70, files_mib=20, high=str(75 * MIB))  # above it crawls
    assert free_mib(machine) == 25
    group(groups / "pod", limit=str(80 * MIB), used_mib=70, files_mib=20, high="max")
    assert free_mib(machine) == 30
    group(groups / "memory" / "pod" / "container", limit=str(50 * MIB), used_mib=40, files_mib=5, old=True)
    assert free_mib(machine) == 15
    group(groups / "pod" / "container", limit=str(8 * MIB), used_mib=9, files_mib=0)
    assert free_mib(machine) == 0


def test_in_a_container_the_own_group_is_at_the_top(machine: Path) -> None:
    group(machine / "cgroup", limit=str(60 * MIB), used_mib=40, files_mib=0)  # its path is the host's, and not there
    assert free_mib(machine) == 20


def test_a_system_that_does_not_say_has_no_known_free_memory(tmp_path: Path) -> None:
    assert free_bytes(proc=tmp_path) is None


def test_without_pinned_memory_a_copy_is_in_other_memory_and_counted() -> None:
    tensor, before = torch.arange(6.0).view(2, 3), counts["unpinned"]
    found = host_copy(tensor.as_subclass(OnGpu), torch.bfloat16)
    assert torch.equal(found, tensor.bfloat16())
    assert counts["unpinned"] == before + 1
    host_copy(tensor)
    assert counts["unpinned"] == before + 1


def test_what_leaves_a_gpu_is_cast_on_it() -> None:
    # a copy into pinned memory that casts on its way is thirty times slower on an H200 (docs/gpu.md)
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                dtypes.append((args[0].dtype, args[1].dtype))
            return func(*args, **(kwargs or {}))

    dtypes = list[tuple[torch.dtype, torch.dtype]]()
    with Copies():
        host_copy(torch.zeros(3).as_subclass(OnGpu), torch.bfloat16)
        assert dtypes == [(torch.bfloat16, torch.bfloat16)]
        host_copy(torch.zeros(3), torch.bfloat16)  # no copy in between where there is one memory
    assert dtypes[1:] == [(torch.bfloat16, torch.float32)]


def test_without_any_memory_the_error_says_for_what() -> None:
    huge = torch.zeros(1).expand(2**50)
    for tensor in (huge, huge.as_subclass(OnGpu)):
        with pytest.raises(HostMemoryError, match=rf"{2**52} bytes, a copy of a tensor of shape \[{2**50}\]"):
            host_copy(tensor)


def test_tensors_after_one_without_memory_are_still_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    gathered: list[tuple[int, ...]] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tuple(tensor.shape))
        return tensor

    def copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if tensor.shape == (3,):
            raise HostMemoryError("no memory")
        return host_copy(tensor, dtype)

    monkeypatch.setattr(parameters, "full", gather)
    monkeypatch.setattr(parameters, "host_copy", copy)
    with pytest.raises(HostMemoryError, match="no memory"):
        list(parameters.published_tensors(model))
    assert gathered == [(3, 2), (3,), (4, 3), (4,)]


def test_pinned_copies_are_counted_as_torch_rounds_them() -> None:
    tensor = torch.zeros(5, 100)
    assert host_copy_bytes(tensor) == 2000
    assert host_copy_bytes(tensor.as_subclass(OnGpu)) == 2048
    assert host_copy_bytes(torch.zeros(512).as_subclass(OnGpu)) == 2048
    assert host_copy_bytes(torch.zeros(0).as_subclass(OnGpu)) == 0
    assert written_bytes({"a": tensor, "b": torch.zeros(3)}, Layout()) == 2012
    assert written_bytes({"a": tensor}, Layout(index=1, num=2)) == 0  # the first process writes it


def part_of(folder: Path, rows: Rows, *, num_sharers: int = 1) -> Part:
    store = CheckpointStore(FileStore(folder / "store"), "demo", folder=folder, max_bytes=16, num_sharers=num_sharers)
    return store.begin_part(PolicyVersion(1, 4), rows, known={}, in_background=True)


@pytest.mark.parametrize(
    ("free", "num_sharers", "is_staged"),
    [(400, 1, True), (399, 1, False), (800, 2, True), (799, 2, False), (None, 1, False)],
)
def test_a_checkpoint_is_copied_to_memory_where_three_quarters_of_what_is_free_hold_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int | None, num_sharers: int, is_staged: bool
) -> None:
    monkeypatch.setattr(parts, "free_bytes", lambda: free)
    monkeypatch.setattr(parts, "kept_pinned_bytes", lambda: 0)
    part = part_of(tmp_path, Rows(lambda: iter(()), 300), num_sharers=num_sharers)
    assert part.is_staged is is_staged


def test_memory_that_is_kept_pinned_is_not_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "free_bytes", lambda: 600)
    monkeypatch.setattr(parts, "kept_pinned_bytes", lambda: 0)
    monkeypatch.setitem(counts, "checkpoint_bytes", 0)

    def is_staged() -> bool:
        return part_of(tmp_path, Rows(lambda: iter(()), 100), num_sharers=4).is_staged

    assert is_staged()
    # each of the four has taken its 100 of the 600, and torch keeps them
    monkeypatch.setattr(parts, "free_bytes", lambda: 200)
    monkeypatch.setattr(parts, "kept_pinned_bytes", lambda: 100)
    assert is_staged()
    monkeypatch.setattr(parts, "kept_pinned_bytes", lambda: 60)
    assert not is_staged()
    monkeypatch.setattr(parts, "kept_pinned_bytes", lambda: 100)  # not of a checkpoint, but of snapshots
    monkeypatch.setitem(counts, "checkpoint_bytes", 0)
    assert not is_staged()


def test_where_memory_ends_amid_the_copies_all_are_read_again_while_they_are_uploaded(tmp_path: Path) -> None:
    tensors = {name: torch.full((4,), float(i)) for i, name in enumerate("abc")}
    tries: list[int] = []

    def copies() -> Iterator[tuple[str, str, TensorSlice]]:
        tries.append(len(list(tmp_path.glob("*/*.safetensors"))))
        for name, rows in written_slices(tensors, Layout()):
            if len(tries) == 1 and name == "c":
                raise HostMemoryError("no memory for c")
            yield "model", name, rows

    before = counts["checkpoint_not_staged"]
    part = part_of(tmp_path, Rows(copies, 48))
    assert (part.is_staged, counts["checkpoint_not_staged"]) == (False, before + 1)
    part.upload()
    assert ([name for each in part.objects for name in each.slices], len(tries)) == (["a", "b", "c"], 2)


def test_a_part_in_memory_is_in_no_file_before_it_is_uploaded(tmp_path: Path) -> None:
    copied: list[weakref.ref[torch.Tensor]] = []

    def copies() -> Iterator[tuple[str, str, TensorSlice]]:
        for name in "abc":
            tensor = torch.zeros(4)
            copied.append(weakref.ref(tensor))
            yield "model", name, TensorSlice(tensor, 0, (4,))

    num_held: list[int] = []
    part = part_of(tmp_path, Rows(copies, 48))
    assert part.is_staged
    assert len(copied) == 3
    assert not list(tmp_path.glob("1-4-*/*.safetensors"))
    digest_of_file = parts.digest_of_file

    def noted(path: Path) -> str:
        num_held.append(sum(each() is not None for each in copied))
        return digest_of_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "digest_of_file", noted)
        part.upload()
    assert num_held == [3, 2, 1]
