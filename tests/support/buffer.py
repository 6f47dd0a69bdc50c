"""A real buffer process over a real Redis, and builders of recipes, prompts, rollouts and heartbeats for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tba.api import LineageReply, LineageRequest, Prompt, RunInfo, Split, VersionRequest
from tba.clients import BufferClient
from tba.config import Recipe, load_recipe, parse_recipe
from tba.versions import START, PolicyVersion
from tba.wire import Heartbeat, Rollout, Sampling, VersionSpan, encode_rollout, new_rollout_id
from tba.wire.sequences import MAX_TOKENS
from tests.support.redis_process import DURABLE, RedisProcess, free_port, start_redis
from tests.support.rollout_values import array_bytes
from tests.support.waits import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
SERVICE_PATHS = [ROOT, *(ROOT / "services" / name for name in ("buffer", "reward", "searcher", "trainer"))]


def make_recipe(*, run: str | dict[str, Any] = "test", **sections: dict[str, Any]) -> Recipe:
    """Return a small recipe; sections override its values, for example `sampling={"group_size": 4}`."""
    document: dict[str, dict[str, Any]] = {
        "run": {"name": run} if isinstance(run, str) else run,
        "model": {"path": "models/none"},
        "data": {"generator": "addition"},
        "objective": {"preset": "tb"},
        "eval": {"num_samples": 2, "timeout_s": 1000.0},
        "searcher": {"max_response_tokens": MAX_TOKENS},  # tests push rollouts of many lengths
        "sampling": {"prompts_per_batch": 4, "group_size": 4, "rollouts_per_visit": 4, "min_size_to_sample": 8},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return parse_recipe(document, where="test recipe")


def write_recipe(path: Path, recipe: Recipe) -> Path:
    """Write a resolved recipe as JSON; return the path."""
    path.write_text(recipe.model_dump_json())
    return path


def start_service(module: str, recipe_path: Path, log_path: Path, **environ: str) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE --config RECIPE` and return the process; its output is appended to the log."""
    paths = os.pathsep.join(map(str, SERVICE_PATHS))
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(recipe_path)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environ},
            stdout=log,
            stderr=log,
        )


@dataclass
class BufferProcess:
    """A buffer process that can be killed and started again on the same port."""

    recipe_path: Path
    url: str
    log_path: Path
    process: subprocess.Popen[bytes] = field(init=False)
    clients: list[BufferClient] = field(default_factory=list)

    def start(self) -> None:
        """Start and wait until it is ready."""
        self.process = start_service("tba_buffer", self.recipe_path, self.log_path)
        deadline = time.monotonic() + DEADLINE_S
        while not _is_ready(self.url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the buffer did not start: {self.log_path.read_text()[-3000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Close the clients, and kill the process if it still runs."""
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.kill()

    def client(self, *, token: str | None = None, retry_s: float = 20.0) -> BufferClient:
        self.clients.append(BufferClient(self.url, token=token, retry_s=retry_s))
        return self.clients[-1]


def start_buffer(recipe_path: Path) -> BufferProcess:
    """Start a buffer process for a recipe whose port and Redis are set; the caller stops it."""
    recipe = load_recipe(recipe_path, environ={})
    buffer = BufferProcess(
        recipe_path=recipe_path, url=recipe.buffer_url, log_path=recipe_path.with_suffix(".buffer.log")
    )
    buffer.start()
    return buffer


@dataclass
class Stack:
    """Redis and the buffer, real processes."""

    redis: RedisProcess
    buffer: BufferProcess
    recipe: Recipe

    @property
    def client(self) -> BufferClient:
        return self.buffer.client()

    def stop(self) -> None:
        self.buffer.stop()
        self.redis.stop()


def start_stack(
    folder: Path,
    *,
    redis_folder: Path | None = None,
    redis_environ: Mapping[str, str] | None = None,
    redis_options: Sequence[str] = DURABLE,
    **sections: dict[str, Any],
) -> Stack:
    """Start Redis and a buffer in `folder`; the caller stops them."""
    folder.mkdir(parents=True, exist_ok=True)
    redis = start_redis(redis_folder or folder / "redis", environ=redis_environ, options=redis_options)
    try:
        ports = {"port": free_port(), "redis_url": redis.url}
        recipe = make_recipe(**{**sections, "buffer": {**ports, **sections.get("buffer", {})}})
        buffer = start_buffer(write_recipe(folder / "recipe.json", recipe))
    except BaseException:
        redis.stop()
        raise
    return Stack(redis=redis, buffer=buffer, recipe=recipe)


def make_prompts(num_train: int, num_heldout: int = 0) -> list[Prompt]:
    """Return prompts with the ids `train-<i>` and `heldout-<i>`."""
    splits: tuple[tuple[Split, int], ...] = (("train", num_train), ("heldout", num_heldout))
    return [
        Prompt(prompt_id=f"{split}-{i}", task="addition", text=f"{i}+{i}=", data={"answer": 2 * i}, split=split)
        for split, num in splits
        for i in range(num)
    ]


def make_rollout(prompt_id: str = "train-0", *, reward: float | None = 1.0, **changes: Any) -> Rollout:
    """Return a valid rollout; `changes` are its fields, or `version` and `num_tokens` of its one version span."""
    version = changes.pop("version", START)
    num_tokens = changes.pop("num_tokens", 3)
    values: dict[str, Any] = {
        "rollout_id": new_rollout_id(),
        "run": "test",
        "task": "addition",
        "prompt_id": prompt_id,
        "visit_id": "visit-of-nobody",
        "prompt_tokens": np.array([5, 6, 7], dtype=np.int32),
        "response_tokens": np.arange(1, num_tokens + 1, dtype=np.int32),
        "response_text": "42",
        "finish_reason": "stop",
        "version_spans": (VersionSpan.of(version, 0, num_tokens),),
        "sampling": Sampling.of(1.0),
        "sampler_logprobs": np.full(num_tokens, -0.5, dtype=np.float32),
        "ref_logprob": None,
        "reward": reward,
        "reward_status": "scored" if reward is not None else "pending",
        "reward_reason": None,
        "reward_version": "addition-1" if reward is not None else None,
        "searcher_id": "searcher-test",
        "started_at_s": 1.0,
        "finished_at_s": 2.0,
    }
    return Rollout(**array_bytes({**values, **changes}))


def make_payloads(prompt_ids: Sequence[str], *, per_prompt: int = 4, **changes: Any) -> list[bytes]:
    """Return encoded rollouts: `per_prompt` of each prompt, with rewards 0, 1, 2, ..."""
    return [
        encode_rollout(make_rollout(prompt_id, reward=float(i), **changes))
        for prompt_id in prompt_ids
        for i in range(per_prompt)
    ]


def start_lineage(client: BufferClient, parent: PolicyVersion = START, *, mark: bool = True) -> LineageReply:
    """Register a trainer that starts from `parent`; with `mark` announce that version too. Return the lineage."""
    lineage = client.new_lineage(LineageRequest(trainer_id="trainer-test", parent=str(parent)))
    if mark:
        client.announce_version(VersionRequest(version=str(parent), token=lineage.token))
    return lineage


def begin_run(client: BufferClient, num_train: int, num_heldout: int = 0, *, per_prompt: int = 0) -> LineageReply:
    """Upload prompts, start a lineage, and push `per_prompt` rollouts of each training prompt; return the lineage."""
    client.upload_prompts(make_prompts(num_train, num_heldout))
    lineage = start_lineage(client)
    if per_prompt:
        client.push(make_payloads([f"train-{i}" for i in range(num_train)], per_prompt=per_prompt))
    return lineage


def make_heartbeat(component_id: str = "searcher-0", kind: str = "searcher", **changes: Any) -> Heartbeat:
    """Return a heartbeat of a component that runs and waits for nothing."""
    values = {"run": "test", "state": "running", "version": None, "wait": None, **changes}
    return Heartbeat(component_id=component_id, kind=kind, **values)


def stored_run(client: BufferClient) -> RunInfo:
    """Return the run without parts that change by themselves: components of the services, and the note about them."""
    info = client.run()
    components = [item for item in info.components if item.kind not in ("buffer", "reward")]
    return info.model_copy(update={"components": components, "note": None})


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2) as response:
            return json.loads(response.read())["status"] == "ok"
    except (OSError, urllib.error.URLError, ValueError, KeyError):
        return False
