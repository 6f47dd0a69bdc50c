"""Named tensors in safetensors files of bounded size, and the temporary folder that such files lie in.

Tensors are written as they come and read one at a time: no more than one file's tensors are in memory at once.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tba.early_signals import delete_on_quit

SUFFIX = ".safetensors"
PREFIX = "tba-trainer-"
"""Of the names of temporary folders."""
_LOCK = "lock"
Item = TypeVar("Item")


def write_tensor_files(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, *, stem: str, max_bytes: int
) -> Iterator[Path]:
    """Write tensors, in the order in which they come, to `stem-00001.safetensors`, `stem-00002.safetensors`, ...

    Args:
        tensors: names and contiguous CPU tensors.
        max_bytes: of tensors in one file; a single larger tensor gets a file of its own.

    Yields:
        Each file once it is complete; the caller may delete it. At least one, empty if there are no tensors.
    """
    number, num_bytes = 1, 0
    pending: dict[str, Tensor] = {}
    for name, tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        if pending and num_bytes + size_bytes > max_bytes:
            yield _save(pending, folder / f"{stem}-{number:05d}{SUFFIX}")
            number, num_bytes, pending = number + 1, 0, {}
        pending[name] = tensor
        num_bytes += size_bytes
    yield _save(pending, folder / f"{stem}-{number:05d}{SUFFIX}")


def write_model_files(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, max_bytes: int) -> list[Path]:
    """Write tensors under the file names of a Hugging Face model.

    That is `model.safetensors` for a single file, `model-00001-of-00003.safetensors` and so on for several.
    """
    paths = list(write_tensor_files(tensors, folder, stem="model", max_bytes=max_bytes))
    if len(paths) == 1:
        return [paths[0].rename(folder / f"model{SUFFIX}")]
    return [path.rename(folder / f"{path.stem}-of-{len(paths):05d}{SUFFIX}") for path in paths]


def lockstep(items: Iterable[Item]) -> Generator[Item]:
    """Yield the items, and draw them to the last even when the consumer stops early and closes the iterator."""
    # each item of a sharded model is a collective: processes that stop at different items would wait for each other
    iterator = iter(items)
    try:
        for item in iterator:  # noqa: UP028 ("yield from" would close the iterator when this one is closed)
            yield item
    finally:
        for _ in iterator:
            pass


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of several files by name, in the order of the files; each is read on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                self._paths |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._paths[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _save(tensors: dict[str, Tensor], path: Path) -> Path:
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:  # a full disk is in its text alone: callers expect an OSError
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    return path


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder for large files of this process under TMPDIR, and delete it at the end.

    A killed process cannot clean up, and a snapshot is as large as the model, so the folders of killed processes are
    deleted too.
    """
    _delete_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        # the kernel releases this lock when the process is gone, whatever ended it
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with delete_on_quit(folder):
                yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, not ours, or not locked yet
            continue
