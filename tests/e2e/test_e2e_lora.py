"""A run with LoRA in real processes publishes adapters and ends as a plain model; and its metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tests.e2e.conftest import MakePlace
from tests.support.e2e import RUN, Place

NUM_STEPS = 8
LORA = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def tensors(place: Place, version: str, folder: Path) -> dict[str, torch.Tensor]:
    versions = WeightVersions(FileStore(place.folder / "store"), RUN)
    return load_file(versions.download_tensors(PolicyVersion.parse(version), folder / version).paths[0])


def test_a_lora_run_ends_as_a_plain_model(make_place: MakePlace, tmp_path: Path) -> None:
    """tests/integration/trainer/test_trainer_lora_runs.py checks its checkpoints."""
    rate = {"value": 1e-2}
    place = make_place(
        objective={"preset": "tba_prime", "reference_reset_steps": 4},
        trainer={"num_steps": NUM_STEPS, "sync_interval": 2, "checkpoint_interval": 2, "learning_rate": rate},
        tracking={"tensorboard_dir": "tensorboard"},
    )
    started = place.start("--set", f"model.lora={json.dumps(LORA).replace(':', ' =')}")
    assert started.wait() == 0, started.err + started.out

    lines: list[dict[str, Any]] = [
        json.loads(text) for text in (place.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["parent"] for line in lines if line["kind"] == "start"] == ["0-0"]
    steps = [(line["lineage"], line["step"]) for line in lines if line["kind"] == "step"]
    assert steps == [(1, step) for step in range(1, NUM_STEPS + 1)]
    evaluated = {line["eval_id"] for line in lines if line["kind"] == "evaluation"}
    history = json.loads((place.folder / "history.json").read_text())
    assert evaluated == {info["eval_id"] for info in history["info"]["evals"]}
    assert list((place.folder / "tensorboard").glob("events.out.tfevents.*"))

    versions = WeightVersions(FileStore(place.folder / "store"), RUN)
    kinds = {str(version): versions.manifest(version).adapter is not None for version in versions.versions()}
    assert kinds == {name: name != "0-0" for name in kinds}
    assert f"1-{NUM_STEPS}" in kinds

    start, last = tensors(place, "0-0", tmp_path), tensors(place, f"1-{NUM_STEPS}", tmp_path)
    moved = {name.split(".")[-2] for name in start if not torch.equal(start[name], last[name])}
    assert moved == {"q_proj", "v_proj"}
    exported: Any = AutoModelForCausalLM.from_pretrained(place.folder / "model")
    assert all(torch.equal(parameter, last[name]) for name, parameter in exported.named_parameters())
