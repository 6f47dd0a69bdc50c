"""Trace whole optimizer steps on tensors that say they are on CUDA, on a machine without a GPU and without CUDA.

`python -m tests.support.fake_cuda CASES` reads recipes and models, and prints what their steps would do on a GPU.
torch's fake tensors have no values and need no device. Only autograd's engine asks for a device: it gets the one of
fake_cuda.cpp, which must be preloaded before torch starts (`environ`).
"""

from __future__ import annotations

import importlib.util
import json
import linecache
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tba_trainer.checkpoints import canary
from tba_trainer.learner import learner, reference
from tba_trainer.learner.learner import Learner
from tba_trainer.memory_trace import step
from tba_trainer.memory_trace.fake_device import FakeDevice, LiveBytes
from tba_trainer.model.packing import PackedSequences
from tba_trainer.model.parameters import published_tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tba.config import Recipe

SOURCE = Path(__file__).with_suffix(".cpp")
ROOT = Path(__file__).parents[2]
OWN_CODE = ROOT / "services/trainer/tba_trainer"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


def environ(folder: Path) -> dict[str, str]:
    """Compile fake_cuda.cpp into `folder`; return an environment that preloads it into a process."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder, library = Path(spec.origin).parent, folder / "fake_cuda.so"
    command = [
        "g++",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{torch_folder / 'include'}",
        str(SOURCE),
        "-o",
        str(library),
    ]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    subprocess.run([*command, *libraries], check=True)
    paths = os.pathsep.join([str(ROOT), str(OWN_CODE.parent)])
    return {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@dataclass(slots=True)
class Seen:
    """Counts of what torch ops did; the first three by the trainer's line that called them, `file.py: code`."""

    waits: Counter[str] = field(default_factory=Counter)
    """Reads of a value, for which the host waits for the device."""
    blocking_copies: Counter[str] = field(default_factory=Counter)
    """Writes for which the host waits: synchronous copies, and ops on the device with a CPU tensor."""
    on_cpu: Counter[str] = field(default_factory=Counter)
    """Tensors that the model's ops left on the CPU."""
    products: Counter[str] = field(default_factory=Counter)
    """Matrix products by op and dtype."""
    attention: Counter[str] = field(default_factory=Counter)
    """Attention by op and dtype."""
    float64_elements: int = 0
    """Number of elements of the largest float64 tensor."""
    ops: set[str] = field(default_factory=set)

    def as_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class FakeCuda(FakeDevice):
    """A fake CUDA device that counts every transfer between it and the CPU in `seen`."""

    type = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves([args, kwargs]) if isinstance(value, Tensor)]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return NotImplemented  # it asks again with its own shard
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._without_fake(func, args, kwargs, tensors, target)
        self.seen.ops.add(func.name())
        if func is torch.ops.aten.allclose.default:
            return True  # as on the fake CPU
        if func is torch.ops.aten._local_scalar_dense.default:
            self.seen.waits[_line()] += 1
            return 0.0 if args[0].is_floating_point() else 0
        if target == "cpu" or (func is torch.ops.aten.copy_.default and not isinstance(args[0], FakeTensor)):
            self.seen.waits[_line()] += 1
            with unset_fake_temporarily():
                return args[0].zero_() if target is None else torch.zeros(args[0].shape, dtype=kwargs.get("dtype"))
        asynchronous = func is torch.ops.aten.copy_.default and True in args[2:]
        if any(not isinstance(tensor, FakeTensor) and tensor.dim() for tensor in tensors) and not asynchronous:
            self.seen.blocking_copies[_line()] += 1
        result = func(*args, **kwargs)
        self._note(func, args, result)
        return result

    def _without_fake(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], target: str | None) -> Any:
        if target != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not tensors:
            return func(*args, **kwargs)  # made on the device
        (like,) = tensors
        if not like.is_meta and not kwargs.get("non_blocking"):
            self.seen.blocking_copies[_line()] += 1
        return torch.empty(like.shape, dtype=kwargs.get("dtype") or like.dtype, device="cuda")

    def _note(self, func: Any, args: Any, result: Any) -> None:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in PRODUCTS:
            factor = args[1]  # the first argument of `addmm` is what the product is added to
            self.seen.products[f"{name} {str(factor.dtype).partition('.')[2]}"] += 1
        if "attn" in name or "attention" in name:
            self.seen.attention[f"{name} {str(args[0].dtype).partition('.')[2]}"] += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                if tensor.device.type == "cpu":
                    self.seen.on_cpu[_line()] += 1
                if tensor.dtype == torch.float64:
                    self.seen.float64_elements = max(self.seen.float64_elements, tensor.numel())


def _line() -> str:
    """Return the innermost line of the trainer's own code on the call stack, as `file.py: code`."""
    frame: Any = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(OWN_CODE) and path.parent.name != "memory_trace":
            return f"{path.name}: {linecache.getline(str(path), frame.f_lineno).strip()}"
        frame = frame.f_back
    return "elsewhere"


class _Stream:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name not in ("record_event", "wait_event", "wait_stream", "record", "wait"):
            raise AttributeError(name)
        return lambda *_args: self


@contextmanager
def no_driver() -> Iterator[None]:
    """Patch torch for the block, so that it needs no CUDA driver and sees eight GPUs."""
    answers = {
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "device_count": lambda: 8,
        "get_device_capability": lambda _device=None: (9, 0),
        "is_bf16_supported": lambda *_args, **_kwargs: True,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda _device=None: _Stream(),
        "stream": lambda _stream: nullcontext(),
    }
    with (
        patch.multiple(torch.cuda, **answers),
        # not `is_available`: where that is true, torch would start the device
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(Tensor, "record_stream", lambda *_args: None),
        patch.object(Tensor, "pin_memory", lambda tensor, *_args: tensor),
        patch.object(torch, "empty", lambda *args, pin_memory=False, empty=torch.empty, **named: empty(*args, **named)),
        patch.object(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),
    ):
        yield


class Lookup:
    """Replaces `LogprobModel` where only the code after the model matters: log-probs are one look-up in the head."""

    def __init__(self, model: Any, **_kwargs: Any) -> None:
        self.model, self._weight = model, model.get_output_embeddings().weight

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def token_logprobs(self, sequences: PackedSequences) -> Tensor:
        return self._weight[sequences.trained_tokens, 0]

    def logprobs_and_entropy(self, sequences: PackedSequences) -> tuple[Tensor, Tensor]:
        return self.token_logprobs(sequences), torch.zeros((), device=self.device)


def trace(recipe: Recipe, config: dict[str, Any]) -> dict[str, Any]:
    """Trace a step and a weight snapshot of the whole model; return its bytes, and the `Seen` of each part."""
    device, found, original = FakeCuda(), {}, step.measured

    def measured(learning: Learner, recipe: Recipe, live: LiveBytes) -> dict[str, int]:
        gradients = learning.gradients

        def after_start(*args: Any, **kwargs: Any) -> Any:
            device.seen = Seen()
            return gradients(*args, **kwargs)

        with patch.object(learning, "gradients", after_start):
            result = original(learning, recipe, live)
        found["step"], device.seen = device.seen, Seen()
        for _ in published_tensors(learning.model, torch.bfloat16):
            pass
        found["snapshot"] = device.seen
        return result

    num_layers = int(config[step.layers_key(config)])
    with patch.object(step, "measured", measured):
        size = step.trace_step(recipe, config, num_layers=num_layers, device=device)
    return {"bytes": asdict(size), **{part: seen.as_json() for part, seen in found.items()}}


def main() -> None:
    """Print one JSON object: case name -> its trace, or its `error`."""
    cases, traces = json.loads(Path(sys.argv[1]).read_text()), {}
    for name, case in cases.items():
        with no_driver(), ExitStack() as stack:
            if not case["passes"]:
                for module in (learner, reference, canary):
                    stack.enter_context(patch.object(module, "LogprobModel", Lookup))
            try:
                traces[name] = trace(Recipe.model_validate(case["recipe"]), case["model"])
            except Exception:
                traces[name] = {"error": traceback.format_exc()}
    print(json.dumps(traces, default=sorted))


if __name__ == "__main__":
    main()
