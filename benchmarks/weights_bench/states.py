"""States of weights on disk, and large ones made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from benchmarks.weights_bench.training import Schedule, State, trained_states

States = dict[float, dict[int, State]]
"""Learning rate -> steps since the first version (0: itself) -> weights."""


def kept_states(folder: Path, learning_rates: Sequence[float], schedule: Schedule, seed: int) -> States:
    """Return `trained_states`, from `folder` if they are there: training takes minutes."""
    wanted = json.dumps({**asdict(schedule), "learning_rates": list(learning_rates), "seed": seed})
    done = folder / "settings.json"
    if not done.is_file() or done.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        for rate, states in trained_states(learning_rates, schedule, seed).items():
            for distance, state in states.items():
                write(state, folder / _name(rate, distance))
        done.write_text(wanted)
    distances = (0, *schedule.distances)
    return {rate: {k: _read(folder / _name(rate, k)) for k in distances} for rate in learning_rates}


def write(state: State, path: Path) -> None:
    """Write a safetensors file of bfloat16 tensors."""
    tensors = {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in state.items()}
    save_file(tensors, path)


def num_parameters(state: State) -> int:
    """Return the number of elements of all tensors."""
    return sum(bits.size for bits in state.values())


def tiled(old: State, new: State, least_parameters: int, seed: int) -> tuple[State, State]:
    """Stack copies of each tensor until a state has `least_parameters`, each with rows and columns in another order.

    Both states are treated alike, so that the same elements differ. Copies differ, so that no compressor finds one in
    another; rows and columns of a matrix stay together, because changes lie in them.
    """
    rng = np.random.default_rng(seed)
    num_copies = -(-least_parameters // num_parameters(old))
    large: tuple[dict[str, NDArray[np.uint16]], ...] = ({}, {})
    for name, bits in old.items():
        orders = [np.ix_(*(rng.permutation(length) for length in bits.shape)) for _ in range(num_copies)]
        for target, state in zip(large, (old, new), strict=True):
            target[name] = np.concatenate([state[name][order] for order in orders])
    return large[0], large[1]


def _name(rate: float, distance: int) -> str:
    return f"{rate}-{distance}.safetensors"


def _read(path: Path) -> State:
    return {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in load_file(path).items()}
