"""`tba run` with a trainer of two processes, in bfloat16 and with weights in several files, over real searchers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tba.versions import START, PolicyVersion
from tests.support.e2e import decode_all

NUM_STEPS = 8


@pytest.mark.nightly
def test_a_trainer_of_two_processes_in_bfloat16_runs_to_the_end_and_searchers_take_its_versions(make_place, tmp_path):
    place = make_place(
        trainer={"num_steps": NUM_STEPS, "num_processes": 2, "compute_dtype": "bfloat16"}
        | {"learning_rate": {"value": 1e-4}},
        model={"dtype": "bfloat16"},
    )
    place.finish()
    summary = place.summary()
    assert (summary["state"], summary["steps"], summary["ledger_violations"]) == ("done", NUM_STEPS, [])
    assert place.pids() == []
    log = place.log("trainer")
    assert "Traceback" not in log
    assert "num_ranks=2" in log
    assert {rollout.version for rollout in decode_all(place.rollouts())} >= {START}
    # the last evaluation pins the last version: a searcher has loaded what both processes gathered; its canary agreed
    searcher = place.log("searcher-0")
    assert re.search(rf"weights loaded .*version=1-{NUM_STEPS}\b", searcher), searcher[-3000:]
    assert "version refused" not in searcher

    versions = place.versions()
    manifest = versions.manifest(PolicyVersion(1, NUM_STEPS))
    assert len({tensor.file for tensor in manifest.tensors}) > 1
    assert manifest.delta is not None
    exported: Any = AutoModelForCausalLM.from_pretrained(place.folder / "model")
    assert exported.dtype == torch.bfloat16
    paths = versions.download_tensors(PolicyVersion(1, NUM_STEPS), tmp_path).paths
    published = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert all(torch.equal(parameter, published[name]) for name, parameter in exported.named_parameters())
