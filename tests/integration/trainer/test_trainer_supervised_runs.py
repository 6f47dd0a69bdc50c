"""`python -m tba_trainer.supervised`: whole trainings, killed ones, two processes, and the folders that they make."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tba_reward.model_server.child.classifier import Classifier
from tba_reward.model_server.model_messages import ClassifierSettings, ModelFiles
from tba_searcher.engines.tokenizer import TextCodec
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import load_policy
from tba_trainer.supervised.reward import auc
from tba_trainer.supervised.training import train_item

from tba.config import Recipe
from tba.config.sections import ModelSection
from tba.config.supervised import NewModel
from tba.errors import ConfigError
from tests.support.trainer_team import SERVICE_PATHS
from tests.support.trainer_values import make_recipe

DEADLINE_S = 120.0
NEW = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_length_tokens": 64, "vocab_size": 300}
SUMS = [{"prompt": f"What is {a} and {b}?", "response": f" {a + b}"} for a in range(12) for b in range(3)]


def write(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_of(folder: Path, **item: Any) -> Recipe:
    """A recipe with one item: `[[reward_training]]` where it has a path, else `[[sft]]`."""
    common = {"dataset": "d", "prompt": "{p}", "num_steps": 6, "batch_size": 8, "max_length_tokens": 64}
    common |= {"learning_rate": 5e-3, "eval_every_steps": 3, "checkpoint_interval": 2, "micro_batch_tokens": 100}
    kind = "reward_training" if "path" in item else "sft"
    start = {} if "base" in item else {"new_model": NEW}
    item = {**({"response": "{r}"} if kind == "sft" else {}), **common, **start, **item}
    recipe = make_recipe(folder / "model").model_dump(mode="json")
    return Recipe.model_validate({**recipe, kind: [item], "store": {"shard_bytes": 30_000}})


def train(recipe: Recipe, folder: Path, rows: Sequence[dict[str, str]], *, name: str = "made") -> dict[str, Any]:
    """Train the item in this process; return its report. Every fourth row is held out."""
    kind, examples = "sft" if recipe.sft else "reward", write(folder / f"{name}.jsonl", rows)
    heldout, out = write(folder / f"{name}-heldout.jsonl", rows[::4]), folder / name
    assert train_item(recipe, 0, kind=kind, examples=examples, heldout=heldout, out=out) == 0
    return json.loads((out / "supervised.json").read_text())


def program(recipe: Recipe, folder: Path, rows: Sequence[dict[str, str]], *, name: str) -> list[str]:
    """The command line of the same."""
    (folder / f"{name}.json").write_text(recipe.model_dump_json())
    examples = write(folder / f"{name}.jsonl", rows)
    heldout = write(folder / f"{name}-heldout.jsonl", rows[::4])
    words = ["--config", folder / f"{name}.json", "--item", 0, "--examples", examples, "--heldout", heldout]
    return [sys.executable, "-m", "tba_trainer.supervised", "sft", *map(str, words), "--out", str(folder / name)]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS)), "OMP_NUM_THREADS": "1"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def test_a_killed_training_goes_on_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    # how often checkpoints are written changes nothing
    often, seldom = (recipe_of(tmp_path, num_steps=100, checkpoint_interval=n) for n in (2, 1000))
    command = program(often, tmp_path, SUMS, name="killed")
    # nobody reads what it says: once the pipe is full it stops, so it cannot end before it is killed
    process = subprocess.Popen(command, env=environ(), stderr=subprocess.PIPE, pipesize=4096)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not list(tmp_path.glob(".killed.checkpoint/0*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / "killed").exists()
    [checkpoint] = sorted(tmp_path.glob(".killed.checkpoint/0*"))[-1:]
    resumed = train(seldom, tmp_path, SUMS, name="killed")
    whole = train(seldom, tmp_path, SUMS, name="whole")
    assert 0 < int(checkpoint.name) < 100
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert (tmp_path / "killed/tokenizer.json").read_bytes() == (tmp_path / "whole/tokenizer.json").read_bytes()
    assert resumed["curve"] == whole["curve"]
    assert not list(tmp_path.glob(".*"))
    # it has learned something: a held-out response is mostly right, token by token
    assert whole["metrics"]["heldout_loss"] < 0.3 * whole["curve"][0]["heldout_loss"]


def test_two_processes_train_as_one_and_start_the_second_themselves(tmp_path: Path) -> None:
    whole = train(recipe_of(tmp_path), tmp_path, SUMS, name="one")
    recipe = recipe_of(tmp_path, num_processes=2)
    command = program(recipe, tmp_path, SUMS, name="two")
    done = subprocess.run(command, env=environ(), stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('"step": 6,') == 1  # process 0 alone reports
    shared = json.loads((tmp_path / "two/supervised.json").read_text())
    for ours, theirs in zip(whole["curve"], shared["curve"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], tensor, atol=1e-5, rtol=1e-5)
    assert (tmp_path / "two/model.safetensors.index.json").is_file()


def heldout_loss(folder: Path, rows: Sequence[dict[str, str]]) -> float:
    """Loss per token of a model folder, as trainer and searchers read it."""
    codec = TextCodec(folder)
    model = load_policy(ModelSection(path=str(folder)), device="cpu", gradient_checkpointing=False)
    pairs = [(codec.encode_prompt(row["prompt"]), codec.encode_response(row["response"])) for row in rows]
    arrays = [tuple(torch.tensor(ids).int().numpy() for ids in pair) for pair in pairs]
    with torch.no_grad():
        found = LogprobModel(model, temperature=1.0).token_logprobs(
            pack_sequences([prompt for prompt, _ in arrays], [response for _, response in arrays], "cpu")
        )
    return -float(found.mean())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2"])
def test_a_folder_is_a_starting_model_of_its_family(tmp_path: Path, family: str) -> None:
    recipe = recipe_of(tmp_path, num_steps=2, new_model={**NEW, "family": family})
    report = train(recipe, tmp_path, SUMS)
    assert heldout_loss(tmp_path / "made", SUMS[::4]) == pytest.approx(report["metrics"]["heldout_loss"], abs=1e-5)
    config = json.loads((tmp_path / "made/config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == (family, family != "gpt_neox")
    assert NewModel.model_validate(report["settings"]["new_model"]).family == family


def texts(number: int) -> str:
    return " ".join(word for bit, word in enumerate(["good", "bad", "red", "green"]) if number >> bit & 1)


def test_scorers_read_a_trained_reward_model_as_the_trainer_does(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Say:\n", "chosen": f"good {texts(n & 12)}", "rejected": f"bad {texts(n & 13)}"} for n in range(16)
    ]
    item = {"path": "p", "chosen": "{c}", "rejected": "{r}", "num_steps": 12}
    report = train(recipe_of(tmp_path, **item), tmp_path, rows)
    files = ModelFiles(path=str(tmp_path / "made"), device="cpu")
    scorer = Classifier(ClassifierSettings(files=files, append_eos=True))
    tokens: Any = [[scorer.encode(row["prompt"], row[side]) for row in rows[::4]] for side in ("chosen", "rejected")]
    chosen, rejected = (scorer.values(each) for each in tokens)
    assert report["metrics"]["heldout_chosen_mean"] == pytest.approx(sum(chosen) / 4, abs=1e-5)
    assert report["metrics"]["heldout_rejected_mean"] == pytest.approx(sum(rejected) / 4, abs=1e-5)
    right = sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 4
    assert report["metrics"]["heldout_accuracy"] == right == 1.0


def test_scorers_read_a_trained_classifier_as_the_trainer_does(tmp_path: Path) -> None:
    train(recipe_of(tmp_path, num_steps=2), tmp_path, SUMS, name="base")
    rows = [{"prompt": "", "response": texts(n) or "green", "label": "bad" if n & 4 else "fine"} for n in range(24)]
    item = {"path": "p", "base": str(tmp_path / "base"), "response": "{r}", "label": "l", "labels": ["fine", "bad"]}
    report = train(recipe_of(tmp_path, **item, append_eos=False), tmp_path, rows)
    files = ModelFiles(path=str(tmp_path / "made"), device="cpu")
    assert report["num_of_label"] == {"fine": 12, "bad": 12}
    assert report["num_heldout_of_label"] == {"fine": 3, "bad": 3}
    scorer = Classifier(ClassifierSettings(files=files, label="bad"))
    tokens: Any = [scorer.encode(row["prompt"], row["response"]) for row in rows[::4]]
    scores = torch.tensor(scorer.values(tokens)).numpy()
    probability = Classifier(ClassifierSettings(files=files, label="bad", output="probability")).values(tokens)
    is_bad = torch.tensor([row["label"] == "bad" for row in rows[::4]])
    p = torch.tensor(probability).double()
    loss = -torch.where(is_bad, p, 1 - p).log().mean()
    assert report["metrics"]["heldout_loss"] == pytest.approx(float(loss), abs=1e-5)
    assert report["metrics"]["heldout_accuracy"] == float(((p > 0.5) == is_bad).double().mean())
    assert report["metrics"]["heldout_auc"] == pytest.approx(auc(p.numpy(), is_bad.numpy()))
    assert len(set(scores.tolist())) > 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "made.jsonl is empty"),
        ('{"prompt": "a"}\n', "line 1 has no text 'response'; every row needs prompt, response"),
        ('{"prompt": "a", "response": "b"}\n{"prompt"', "line 2 is not JSON"),
    ],
)
def test_bad_examples_are_one_sentence(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "made.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=message):
        train_item(
            recipe_of(tmp_path), 0, kind="sft", examples=tmp_path / "made.jsonl", heldout=None, out=tmp_path / "made"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["made.jsonl"]


def test_only_a_folder_that_a_training_made_is_replaced(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, num_steps=1)
    train(recipe, tmp_path, SUMS)
    (tmp_path / "made/old").touch()
    train(recipe, tmp_path, SUMS)
    assert not (tmp_path / "made/old").exists()
    (tmp_path / "made/supervised.json").unlink()
    with pytest.raises(ConfigError, match=r"made is there and holds no supervised\.json, so no training made it"):
        train(recipe, tmp_path, SUMS)
    assert list((tmp_path / "made").glob("*.safetensors"))


def test_a_base_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    train(recipe_of(tmp_path, num_steps=1), tmp_path, SUMS, name="base")
    for path in (tmp_path / "base").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"base .*base holds no tokenizer \(tokenizer.json"):
        train(recipe_of(tmp_path, base=str(tmp_path / "base")), tmp_path, SUMS)


def test_a_tokenizer_that_is_too_large_for_the_base_is_refused(tmp_path: Path) -> None:
    train(recipe_of(tmp_path, num_steps=1, new_model={**NEW, "vocab_size": 258}), tmp_path, SUMS, name="base")
    train(recipe_of(tmp_path, num_steps=1), tmp_path, SUMS, name="larger")
    shutil.copyfile(tmp_path / "larger/tokenizer.json", tmp_path / "base/tokenizer.json")
    with pytest.raises(
        ConfigError, match=r"base' gives the token \d+, and the model has 258: they are not of one model"
    ):
        train(recipe_of(tmp_path, base=str(tmp_path / "base")), tmp_path, SUMS)
