"""Real services around a searcher: Redis, buffer, reward service, and a file store with published versions."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tba.api import ComponentInfo, LineageReply, VersionRequest
from tba.clients import BufferClient
from tba.config import Recipe
from tba.store import open_store
from tba.versions import START, PolicyVersion
from tba.weights import DeltaSettings, LocalVersion, WeightVersions
from tba.wire import Canary
from tests.support.buffer import (
    SERVICE_PATHS,
    Stack,
    make_prompts,
    start_lineage,
    start_service,
    start_stack,
    write_recipe,
)
from tests.support.redis_process import free_port

TIMEOUT_S = 120.0


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def publish_version(
    versions: WeightVersions,
    folder: Path,
    version: PolicyVersion,
    *,
    parent: PolicyVersion | None = None,
    canary_shift: float = 0.0,
    dtype: str = "float32",
    base: LocalVersion | None = None,
    deltas: DeltaSettings | None = None,
) -> LocalVersion:
    """Publish the model in `folder` as the trainer does; `canary_shift` is added to the canary, to spoil it.

    With a `base`, its tensors with one weight in fifty changed are published, as a delta if `deltas` allows it.
    """
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if base is not None:
        torch.manual_seed(version.step)
        tensors_before = load_file(base.paths[0])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                before = tensors_before[name]
                parameter.copy_(torch.where(torch.rand(before.shape) < 0.02, before * 1.05, before))
    tensors = folder / f"published-{version}" / "model.safetensors"
    tensors.parent.mkdir(exist_ok=True)
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, tensors, {"format": "pt"})
    prompt, response = [4, 5, 6], [7, 8, 9, 10]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(response)[:, None])[:, 0]
    manifest = versions.publish(
        version=version,
        parent=parent,
        dtype=dtype,
        tensors_paths=[tensors],
        files={path.name: path for name in FILES for path in folder.glob(name)},
        canary=Canary(
            prompt_tokens=prompt,
            response_tokens=response,
            logprobs=[value + canary_shift for value in logprobs.tolist()],
            tolerance=1e-3 if dtype == "float32" else 0.1,
        ),
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        base=base,
        deltas=deltas,
    )
    return LocalVersion(version, (tensors,), manifest)


@dataclass
class World:
    """A run with its services and as many searcher processes as a test starts."""

    stack: Stack
    recipe: Recipe
    recipe_path: Path
    versions: WeightVersions
    lineage: LineageReply
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def client(self) -> BufferClient:
        return self.stack.client

    def start_reward(self) -> subprocess.Popen[bytes]:
        return self._start("tba_reward", {})

    def start_searcher(self, searcher_id: str = "searcher-1", *, change: str = "") -> subprocess.Popen[bytes]:
        """Start a searcher process, which first executes the Python code in `change`."""
        environ = {"TBA_SEARCHER_ID": searcher_id}
        if change:
            folder = self.recipe_path.parent / "change"
            folder.mkdir(exist_ok=True)
            (folder / "sitecustomize.py").write_text(change)
            environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in (folder, *SERVICE_PATHS))
        return self._start("tba_searcher", environ)

    def announce(self, version: PolicyVersion) -> None:
        self.client.announce_version(VersionRequest(version=str(version), token=self.lineage.token))

    def searcher(self, searcher_id: str = "searcher-1") -> ComponentInfo | None:
        """Return the searcher as its last heartbeat described it; None before the first one."""
        found = [item for item in self.client.run().components if item.component_id == searcher_id]
        return found[0] if found else None

    def log(self) -> str:
        """Return the output of all processes."""
        return self.recipe_path.with_suffix(".log").read_text()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a condition and return its value; after TIMEOUT_S fail with the log."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not happen within {TIMEOUT_S:g} s; log:\n{self.log()[-4000:]}")
            time.sleep(0.05)
        return value

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.stack.stop()

    def _start(self, module: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        self.processes.append(start_service(module, self.recipe_path, self.recipe_path.with_suffix(".log"), **environ))
        return self.processes[-1]


def start_world(folder: Path, model: Path, *, num_train: int = 8, num_heldout: int = 4, **sections: Any) -> World:
    """Start Redis and a buffer, upload prompts, publish and announce version 0-0; the caller stops the world."""
    searcher = {"num_slots": 8, "max_prompt_tokens": 24, "max_response_tokens": 12, "drain_s": 10.0}
    merged = {
        "store": {"url": f"file://{folder / 'store'}"},
        "reward": {"port": free_port()},
        **sections,
        "searcher": {**searcher, **sections.get("searcher", {})},
    }
    stack = start_stack(folder, **merged)
    try:
        recipe_path = write_recipe(folder / "searcher.json", stack.recipe)
        versions = WeightVersions(open_store(stack.recipe.store), stack.recipe.run.name)
        publish_version(versions, model, START)
        if num_train + num_heldout:
            stack.client.upload_prompts(make_prompts(num_train, num_heldout))
        lineage = start_lineage(stack.client)
    except BaseException:
        stack.stop()
        raise
    return World(stack, stack.recipe, recipe_path, versions, lineage)


def sigterm(process: subprocess.Popen[bytes]) -> int:
    """Send SIGTERM to a process, and return its exit code."""
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=TIMEOUT_S)
