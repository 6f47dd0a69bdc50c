"""Ref log-probs as the searcher computes them, against the trainer's reference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_searcher.engines.torch import reference_logprobs as reference_module
from tba_searcher.engines.torch.reference_logprobs import StartingModel, load_starting_model
from tba_searcher.service import Clients, Searcher
from tba_trainer.learner.learner import Learner
from tba_trainer.model.policy import load_policy

from tba.config import parse_recipe
from tba.errors import TbaError
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, WeightVersions, params_sha256_of_files
from tba.wire import Rollout
from tests.support.searcher_world import publish_version
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import make_recipe, make_rollout
from tests.support.wire_values import conversation

TEMPERATURE = 0.7


def rollouts_of_many_lengths() -> list[Rollout]:
    rng = np.random.default_rng(5)
    sizes = [(int(rng.integers(1, 9)), int(rng.integers(1, 30))) for _ in range(24)]
    plain = [make_rollout(rng, num_prompt_tokens=prompt, num_response_tokens=answer) for prompt, answer in sizes]
    return [*plain[:12], conversation(ref_logprob=None), *plain[12:]]


def trainer_sums(folder: Path, rollouts: list[Rollout]) -> list[float]:
    recipe = make_recipe(folder, model={"policy_temperature": TEMPERATURE})
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    values = Learner(model, recipe, np.random.default_rng(0)).reference.logprobs(rollouts)
    assert values is not None
    return [float(each.sum()) for each in values]


def searcher_sums(model: StartingModel, rollouts: list[Rollout]) -> list[float]:
    return model.sums([rollout.sequences for rollout in rollouts])


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen2", True), ("gpt_neox", False)])
def test_the_sums_are_those_of_the_trainers_reference(tmp_path: Path, architecture, tied: bool, monkeypatch) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture, tied=tied)
    rollouts = rollouts_of_many_lengths()
    expected = trainer_sums(folder, rollouts)
    model = StartingModel(folder, temperature=TEMPERATURE, dtype="float32", device="cpu")
    assert searcher_sums(model, rollouts) == pytest.approx(expected, abs=1e-4)
    # in many passes, and the head a few tokens at a time
    monkeypatch.setattr(reference_module, "PASS_TOKENS", 40)
    monkeypatch.setattr(reference_module, "LOGITS_BYTES", 4 * 33 * 3)
    assert searcher_sums(model, rollouts) == pytest.approx(expected, abs=1e-4)
    other = StartingModel(folder, temperature=1.0, dtype="float32", device="cpu")
    assert searcher_sums(other, rollouts) != pytest.approx(expected, abs=1e-1)


def test_logits_that_the_head_alone_does_not_give_go_through_the_whole_model(tmp_path: Path) -> None:
    """A soft cap on the logits is such a case; here it is a scale, added by a hook on the whole model."""
    folder = make_tiny_model(tmp_path)
    rollouts = rollouts_of_many_lengths()
    plain = searcher_sums(StartingModel(folder, temperature=1.0, dtype="float32", device="cpu"), rollouts)
    scaled = StartingModel(folder, temperature=2.0, dtype="float32", device="cpu")

    def double(module: object, inputs: object, output: dict[str, torch.Tensor]) -> None:
        output["logits"] = output["logits"] * 2

    scaled._model.register_forward_hook(double)
    scaled._has_plain_head = scaled._probe()
    assert not scaled._has_plain_head
    assert searcher_sums(scaled, rollouts) == pytest.approx(plain, abs=1e-4)


def test_the_starting_model_is_version_0_0_of_the_store_checked_like_any_other(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=True)
    versions = WeightVersions(FileStore(tmp_path / "store"), "demo")
    options = {"temperature": TEMPERATURE, "device": "cpu", "trust_remote_code": False}
    with pytest.raises(TbaError, match=r"reference_placement.* cannot be used: weight version 0-0"):
        load_starting_model(versions, tmp_path, **options)
    publish_version(versions, folder, START)
    rollouts = rollouts_of_many_lengths()
    model = load_starting_model(versions, tmp_path, **options)
    assert searcher_sums(model, rollouts) == pytest.approx(trainer_sums(folder, rollouts), abs=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "store"}  # nothing is left behind
    # tensors that are on this machine are not downloaded again
    here = versions.download_tensors(START, tmp_path / "here")
    fetched: list[str] = []

    class Noting(FileStore):
        def get_file(self, key: str, path: Path, *, max_bytes: int | None = None) -> None:
            fetched.append(key.rpartition("/")[2])
            super().get_file(key, path, max_bytes=max_bytes)

    load_starting_model(WeightVersions(Noting(tmp_path / "store"), "demo"), tmp_path, held=[here], **options)
    assert "config.json" in fetched
    assert not [name for name in fetched if name.endswith(".safetensors")]
    assert {path.name for path in tmp_path.iterdir()} == {"model", "store", "here"}
    assert params_sha256_of_files(here.paths) == here.manifest.params_sha256
    bad = WeightVersions(FileStore(tmp_path / "store"), "bad")
    publish_version(bad, folder, START, canary_shift=0.1)
    with pytest.raises(TbaError, match=r"cannot be used: weight version 0-0: canary log-probs are off"):
        load_starting_model(bad, tmp_path, **options)


@pytest.mark.parametrize("is_adapter", [True, False])
def test_a_searcher_that_holds_the_starting_model_reads_it_from_there(tmp_path, is_adapter: bool, monkeypatch) -> None:
    """A version that is an adapter came with 0-0 beside it: to download that again costs the size of the model."""
    document = make_recipe(tmp_path).model_dump(mode="json")
    document["objective"]["reference_placement"] = "searcher"
    document["store"] |= {"url": f"file://{tmp_path / 'store'}"}
    nobody: Any = None
    clients = Clients(buffer=nobody, heartbeats=nobody, reward=nobody)
    recipe = parse_recipe(document, where="test")
    searcher = Searcher(recipe, tmp_path / "searcher", searcher_id="s", clients=clients, stop=asyncio.Event())
    manifest: Any = None
    start = LocalVersion(START, (tmp_path / "start",), manifest)
    version = LocalVersion(PolicyVersion(1, 2), (tmp_path / "2",), manifest, base=start if is_adapter else None)
    asked: list[Sequence[LocalVersion]] = []

    def load(*_: object, held: Sequence[LocalVersion], **__: object) -> None:
        asked.append(held)
        raise TbaError("enough")

    monkeypatch.setattr(reference_module, "load_starting_model", load)
    with pytest.raises(TbaError, match="enough"):
        searcher._build(version, tmp_path)
    assert asked == [[version, start] if is_adapter else [version]]
