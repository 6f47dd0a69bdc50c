"""States of bfloat16 weights, one version apart, made by rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

State = Mapping[str, NDArray[np.uint16]]
"""Tensor name -> the bits of its bfloat16 elements, in its shape."""
CHANGED_SHARE = 0.0225
"""Of the elements of a version; a step of policy gradient at a learning rate of 3e-6 changed so many (docs/weights.md).
Each moves by one representable number, as half of those did."""
ROW = 4096


def made_states(num_parameters: int, seed: int = 0) -> tuple[State, State]:
    """Return a state of normal weights in tensors of 16 million elements and more, and its next version."""
    rng = np.random.default_rng(seed)
    old, new = dict[str, NDArray[np.uint16]](), dict[str, NDArray[np.uint16]]()
    num_rows = max(1, num_parameters // ROW)
    num_tensors = max(1, num_rows // ROW)
    for number, rows in enumerate(np.array_split(np.arange(num_rows), num_tensors)):
        values = torch.from_numpy(0.02 * rng.standard_normal((len(rows), ROW), dtype=np.float32))
        bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        moved = rng.random(bits.shape, dtype=np.float32) < CHANGED_SHARE
        old[f"layer.{number}.weight"] = bits
        new[f"layer.{number}.weight"] = np.where(moved, bits ^ 1, bits)
    return old, new


def write(state: State, path: Path) -> None:
    """Write a safetensors file of bfloat16 tensors."""
    tensors = {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in state.items()}
    save_file(tensors, path)
