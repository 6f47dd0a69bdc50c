"""`tba run` with the vLLM engine: the real searcher process on the CPU, weight updates in flight, evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba_cli.generators.addition import REWARD
from tests.support.e2e import RUN, Place, decode_all, tiny_sections
from tests.support.tiny_model import make_tiny_model
from tests.support.vllm_greedy import TIMEOUT_S, why_not

NUM_STEPS = 12
STOPS = [*"0123456789"]


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_a_run_with_vllm_generates_updates_and_evaluates(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    model = make_tiny_model(tmp_path / "model", 0, tied=True, hidden_size=128)
    sections = tiny_sections(
        model,
        searcher={"engine": "vllm", "max_response_tokens": 12, "tasks": {REWARD: {"stop": STOPS}}},
        sampling={"samples_per_insert_error": 32},  # rollouts wait for training, so some are of later versions
        trainer={"num_steps": NUM_STEPS, "sync_interval": 2},
        eval={"every_steps": 6, "num_prompts": 8, "num_prompts_final": 8},
    )
    cached = getattr(pytestconfig, "cache", None)  # not there with -p no:cacheprovider
    cache = {"VLLM_CACHE_ROOT": str(cached.mkdir("vllm"))} if cached else {}
    place = Place(tmp_path, sections, cache)
    try:
        started = place.start()
        assert started.wait() == 0, started.err + started.out + place.log("searcher-0")[-3000:]
        summary = place.summary()
        assert (summary["state"], summary["steps"], summary["num_unknown_scores"]) == ("done", NUM_STEPS, 0)
        log = place.log("searcher-0")
        assert "Traceback" not in log
        assert "version refused" not in log
        assert "weights loaded" in log
        rollouts = decode_all(place.rollouts())
    finally:
        place.close()
    assert {rollout.run for rollout in rollouts} == {RUN}
    assert len({rollout.version for rollout in rollouts}) >= 2
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert reasons <= {"stop", "stop_string", "length"}
    assert "stop_string" in reasons
    for rollout in rollouts:
        assert not [stop for stop in STOPS if stop in rollout.response_text]
        assert rollout.version_spans[-1].end == len(rollout.response_tokens) == len(rollout.sampler_logprobs)
