"""A starting model and a reward model made by the real TRL, in one command, and a short run with both."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from tests.support.e2e import Place, tiny_sections
from tests.support.tiny_model import EOS_ID, make_tiny_model

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl"),
]

SETTINGS = """\
model_name_or_path: {base}
dataset_name: {dataset}
max_steps: {num_steps}
per_device_train_batch_size: 16
learning_rate: 3.0e-3
max_length: 32
gradient_checkpointing: false
bf16: false
use_cpu: true
seed: 7
"""
POLICY, JUDGE = "models/policy", "models/judge"


def write_rows(folder: Path, rows: list[dict[str, str]]) -> None:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_trl_makes_both_models_and_a_run_uses_them(tmp_path: Path) -> None:
    rng = random.Random(0)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(512)]
    sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in pairs]
    # what is preferred must be easy to learn: an answer that ends in 0
    judged = [{"prompt": f"{a}+{b}=", "chosen": f"{b}0", "rejected": f"{b}7"} for a, b in pairs]
    make_tiny_model(tmp_path / "models" / "base", architecture="gpt_neox")
    write_rows(tmp_path / "data" / "sums", sums)
    write_rows(tmp_path / "data" / "judged", judged)
    (tmp_path / "sft.yaml").write_text(SETTINGS.format(base="models/base", dataset="data/sums", num_steps=40))
    (tmp_path / "judge.yaml").write_text(SETTINGS.format(base=POLICY, dataset="data/judged", num_steps=40))
    scorer = {"kind": "reward_model", "model": JUDGE, "append_eos": True}
    place = Place(
        tmp_path,
        tiny_sections(Path(POLICY), reward={"tasks": {"addition": {"scorers": [scorer]}}}, trainer={"num_steps": 2})
        | {
            "prepare": [
                {"path": "models/base", "kind": "model", "manual": "this test makes it"},
                {"path": POLICY, "kind": "model", "trl_sft": "sft.yaml"},
                {"path": JUDGE, "kind": "model", "trl_reward": "judge.yaml", "at_start": True},
            ]
        },  # pyright: ignore[reportArgumentType]
    )
    try:
        made = place.tba("data", "prepare", "recipe.json")
        assert made.returncode == 0, made.stdout + made.stderr
        assert f"`trl sft --config {tmp_path / 'sft.yaml'}` makes {POLICY}" in made.stdout
        names = {path.name for path in (tmp_path / JUDGE).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
        assert "training_args.bin" not in names
        chosen, rejected = (scores(tmp_path / JUDGE, judged[:32], answer) for answer in ("chosen", "rejected"))
        assert sum(good > bad for good, bad in zip(chosen, rejected, strict=True)) > 28
        again = place.tba("data", "prepare", "recipe.json")
        assert f"{JUDGE}: model of TRL, here already" in again.stdout
        started = place.start()
        assert started.wait() == 0, started.out + started.err
    finally:
        place.close()
    records = [json.loads(line) for line in (place.folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["metrics"]["num_unknown"] for each in records if each["kind"] == "evaluation"] == [0, 0]


def scores(folder: Path, rows: list[dict[str, str]], answer: str) -> list[float]:
    """The scores that a scorer with `append_eos` reads: at the end of sequence."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for row in rows:
        ids = torch.tensor([[*tokenizer(row["prompt"] + row[answer])["input_ids"], EOS_ID]])
        with torch.inference_mode():
            found.append(model(ids).logits.item())
    return found
