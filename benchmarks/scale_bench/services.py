"""Redis, the buffer and the reward service as real processes, prompts, and a weight version without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tba.config import Recipe
from tba.store import open_store
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Canary
from tests.support.buffer import Stack, make_prompts, start_stack, write_recipe
from tests.support.redis_process import free_port
from tests.support.reward_process import reward_of

NUM_HELDOUT = 64
VOCAB_SIZE = 32_000


@dataclass(frozen=True)
class Services:
    """The services that the searchers work with."""

    stack: Stack
    recipe: Recipe
    recipe_path: Path
    versions: WeightVersions
    folder: Path

    def publish(self, version: PolicyVersion, parent: PolicyVersion | None) -> None:
        """Make a weight version exist: a few numbers and a `config.json`."""
        folder = self.folder / f"made-{version}"
        folder.mkdir()
        tensors, config = folder / "model.safetensors", folder / "config.json"
        save_file({"weight": np.full(1024, version.step, dtype=np.float32)}, tensors)
        config.write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": 0}))
        self.versions.publish(
            version=version,
            parent=parent,
            dtype="float32",
            tensors_paths=[tensors],
            files={"config.json": config},
            canary=Canary(prompt_tokens=[1], response_tokens=[2], logprobs=[0.0], tolerance=1.0),
            torch_version="none",
            transformers_version="none",
        )


@contextmanager
def running(folder: Path, *, num_prompts: int, **sections: dict[str, Any]) -> Iterator[Services]:
    """Start them; at the end everything is killed.

    Raises:
        RuntimeError: one did not start.
    """
    reward_section = {**sections.get("reward", {}), "port": free_port()}
    sections = {**sections, "store": {"url": f"file://{folder / 'store'}"}, "reward": reward_section}
    everything: dict[str, Any] = sections
    stack = start_stack(folder, **everything)
    try:
        recipe_path = write_recipe(folder / "searchers.json", stack.recipe)
        stack.client.upload_prompts(make_prompts(num_prompts, NUM_HELDOUT))
        versions = WeightVersions(open_store(stack.recipe.store), stack.recipe.run.name)
        with reward_of(recipe_path, stack.recipe.reward_url, {"OMP_NUM_THREADS": "1"}):
            yield Services(stack, stack.recipe, recipe_path, versions, folder)
    finally:
        stack.stop()
