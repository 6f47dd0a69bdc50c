"""The tiny variants of the paper's recipes, as a person starts recipes: `tba data prepare`, then `tba run`, offline.

Every run has one searcher with the real vLLM, a reward service with the recipe's scorers and a trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.support.buffer import SERVICE_PATHS
from tests.support.tiny_recipes import RECIPES, make_items

pytest.importorskip("vllm", reason="vLLM for the CPU is pinned for Linux x86_64 alone")
pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280
POLICIES = {"gsm8k": "llama", "tldr": "gpt_neox", "redteam": "gpt2", "math": "qwen2"}


@dataclass(frozen=True)
class Ended:
    """A recipe that was run."""

    name: str
    place: Path
    output: str

    @property
    def folder(self) -> Path:
        return self.place / "runs" / f"{self.name}-tiny"

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of the trainer's steps."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def recipe_path(name: str) -> Path:
    return RECIPES / f"{name}-tiny.toml"


def tba(place: Path, *words: str) -> str:
    """Run `tba` in a folder; no network can be asked for anything."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *SERVICE_PATHS))),
        "HF_HOME": str(place / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tba_cli.main", *words],
        cwd=place,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where everything that the four recipes need was prepared: by one command, which saves a minute."""
    place = tmp_path_factory.mktemp("recipes")
    documents = [tomllib.loads(recipe_path(name).read_text()) for name in POLICIES]
    items = {item["path"]: item for document in documents for item in document["prepare"]}
    (place / "all.json").write_text(json.dumps({**documents[0], "prepare": list(items.values())}))
    make_items(place, items)
    tba(place, "data", "prepare", "all.json")
    return place


@pytest.fixture(scope="module", params=list(POLICIES))
def ended(request: pytest.FixtureRequest, place: Path) -> Ended:
    return Ended(request.param, place, tba(place, "run", str(recipe_path(request.param))))


def test_a_tiny_recipe_runs_to_its_end_on_scored_rollouts(ended):
    summary = json.loads((ended.folder / "summary.json").read_text())
    num_steps = {"gsm8k": 8, "math": 8}.get(ended.name, 12)
    assert [record["step"] for record in ended.steps] == list(range(1, num_steps + 1))
    assert summary["steps"] == num_steps
    assert summary["ledger_violations"] == []
    if ended.name != "math":  # such a small model boxes now and then what cannot be read: that has no score
        assert summary["num_unknown_scores"] == 0
    assert f"{num_steps} steps in " in ended.output
    assert all(record["metrics"]["reward_mean"] is not None for record in ended.steps)


def test_what_it_trained_is_a_model_of_the_same_family(ended):
    start = ended.place / "models" / "tiny" / POLICIES[ended.name]
    before, after = load_file(start / "model.safetensors"), load_file(ended.folder / "model" / "model.safetensors")
    # transformers 5 calls the output embedding of GPT-NeoX lm_head, and its saved files embed_out: both load
    before, after = ({name.replace("embed_out", "lm_head"): t for name, t in side.items()} for side in (before, after))
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    assert any((before[name] != after[name]).any() for name in before), "no weight has changed"
