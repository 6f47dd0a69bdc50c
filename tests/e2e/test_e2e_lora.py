"""A run with LoRA in real processes: it loses its trainer to kill -9, is resumed, and ends; and its metrics.jsonl."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tba.api import RunInfo
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tests.e2e.conftest import MakePlace
from tests.support.e2e import ENDLESS, RUN, Place, freeze_when, stands_at

NUM_MORE_STEPS = 5
LORA = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def tensors(place: Place, version: str, folder: Path) -> dict[str, torch.Tensor]:
    versions = WeightVersions(FileStore(place.folder / "store"), RUN)
    _, paths = versions.download_tensors(PolicyVersion.parse(version), folder / version)
    return load_file(paths[0])


def is_past_a_checkpoint(info: RunInfo) -> RunInfo | None:
    """There is a step after the last checkpoint, whose version is announced."""
    if info.checkpoint is None or info.latest_version is None:
        return None
    saved, announced = PolicyVersion.parse(info.checkpoint), PolicyVersion.parse(info.latest_version)
    return info if info.step > saved.step and announced >= saved else None


def test_a_lora_run_is_killed_resumed_and_ends_as_a_plain_model(
    make_place: MakePlace, model: Path, tmp_path: Path
) -> None:
    rate = {"value": 1e-2}
    place = make_place(
        objective={"preset": "tba_prime", "reference_reset_steps": 4},
        trainer={"num_steps": ENDLESS, "sync_interval": 2, "checkpoint_interval": 2, "learning_rate": rate},
        tracking={"tensorboard_dir": "tensorboard"},
    )
    words = ("--set", f"model.lora={json.dumps(LORA).replace(':', ' =')}")
    killed = place.start(*words)
    place.until("a checkpoint and a step", is_past_a_checkpoint)
    client, pid = place.client(), place.pid("trainer")
    past = lambda: is_past_a_checkpoint(client.run())  # noqa: E731
    at_kill = freeze_when(pid, "a step after the checkpoint", client, past, same=stands_at)
    client.close()
    assert at_kill is not None
    os.kill(pid, signal.SIGKILL)
    assert killed.wait() != 0
    num_steps = at_kill.step + NUM_MORE_STEPS
    finished = place.start("--resume", *words, "--set", f"trainer.num_steps={num_steps}")
    assert finished.wait() == 0, finished.err + finished.out

    lines: list[dict[str, Any]] = []
    for text in (place.folder / "metrics.jsonl").read_text().splitlines():
        lines.append(json.loads(text))
    first, second = (line["parent"] for line in lines if line["kind"] == "start")
    assert first == "0-0"
    parent = PolicyVersion.parse(second)
    steps = [(line["lineage"], line["step"]) for line in lines if line["kind"] == "step"]
    mine = [step for lineage, step in steps if lineage == 1]
    assert mine == list(range(1, len(mine) + 1))
    assert at_kill.step >= len(mine) >= parent.step  # the last ack may have come before its step was made
    assert [step for lineage, step in steps if lineage == 2] == list(range(parent.step + 1, num_steps + 1))
    evaluated = {line["eval_id"] for line in lines if line["kind"] == "evaluation"}
    assert evaluated == {info["eval_id"] for info in json.loads((place.folder / "history.json").read_text())["evals"]}
    assert list((place.folder / "tensorboard").glob("events.out.tfevents.*"))

    # the resumed lineage announces the weights of the checkpoint: merged again, they have not changed by a bit
    start, last = tensors(place, "0-0", tmp_path), tensors(place, f"2-{num_steps}", tmp_path)
    before, after = tensors(place, second, tmp_path), tensors(place, f"2-{parent.step}", tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    moved = {name.split(".")[-2] for name in start if not torch.equal(start[name], last[name])}
    assert moved == {"q_proj", "v_proj"}
    exported: Any = AutoModelForCausalLM.from_pretrained(place.folder / "model")
    assert all(torch.equal(parameter, last[name]) for name, parameter in exported.named_parameters())
