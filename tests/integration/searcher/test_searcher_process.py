"""The searcher process against a real buffer, reward service and store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tba.api import EvalInfo, Prompt, RunCommand
from tba.versions import START, PolicyVersion
from tba.wire import Rollout
from tests.support.leases import draw, lease, request_eval
from tests.support.listeners import listening_ports
from tests.support.searcher_world import TIMEOUT_S, World, publish_version, sigterm, start_world
from tests.support.tiny_encoder import make_tiny_encoder
from tests.support.tiny_model import make_tiny_model

V1, V2 = PolicyVersion(1, 4), PolicyVersion(1, 8)
BEHIND, AHEAD = (
    f"import time\n_true = time.time\ntime.time = lambda: _true() + {hours} * 3600.0\n" for hours in (-5, 7)
)
"""For `World.start_searcher`: clocks that differ from everybody else's by hours."""
IMPATIENT = "from tba_searcher import waits\nwaits.RETRY_S, waits.SCORE_RETRY_S = 2.0, 1.0\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model(root / str(seed), seed, tied=True) for seed in range(3)]


@pytest.fixture
def make_world(tmp_path: Path, models: list[Path]) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**sections: Any) -> World:
        worlds.append(start_world(tmp_path, models[0], **sections))
        return worlds[-1]

    yield make
    for world in worlds:
        world.stop()


def drawn(world: World) -> list[Rollout]:
    batch = draw(world.client, world.lineage, wait_s=20)
    return [rollout for group in batch.groups for rollout in group.rollouts]


def assert_trainer_agrees(rollouts: list[Rollout], folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_tokens.tolist(), *rollout.response_tokens.tolist()]])
        num_prompt = len(rollout.prompt_tokens)
        with torch.inference_mode():
            logits = model(ids).logits[0, num_prompt - 1 : -1].float() / rollout.sampling.temperature
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, num_prompt:, None])[:, 0].numpy()
        np.testing.assert_allclose(rollout.sampler_logprobs, logprobs, atol=1e-4)


def test_versions_are_pulled_in_flight_evaluations_pin_one_and_a_drain_leaves_nothing_behind(make_world, models):
    world: World = make_world(searcher={"sampling_temperature": 0.8})
    reward = world.start_reward()
    process = world.start_searcher()
    world.until(lambda: world.client.stats().num_scored >= 64, "64 scored rollouts")
    assert listening_ports(reward.pid) == [world.recipe.reward.port]
    assert listening_ports(process.pid) == [], "a searcher listens on nothing"
    rollouts = drawn(world)
    assert len(rollouts) == 16
    assert {rollout.searcher_id for rollout in rollouts} == {"searcher-1"}
    assert {rollout.sampling.temperature for rollout in rollouts} == {0.8}
    assert_trainer_agrees(rollouts, models[0])

    publish_version(world.versions, models[1], V1, parent=START)
    world.announce(V1)
    world.until(lambda: (s := world.searcher()) and s.version == str(V1), "the swap to 1-4")

    eval_id = request_eval(world.client, world.lineage, num_prompts=4).eval_id
    info = world.until(lambda: (i := world.client.get_eval(eval_id)).state == "done" and i, "the evaluation")
    assert info.num_unknown == 0
    assert info.accuracy is not None
    world.until(lambda: (s := world.searcher()) and s.version == str(V1), "the way back to 1-4")

    publish_version(world.versions, models[2], V2, parent=V1, canary_shift=0.1)
    world.announce(V2)
    info = world.until(lambda: (s := world.searcher()) and s.gauges["refused_versions"] == 1 and s, "the refusal")
    assert info.version == str(V1)
    assert "canary log-probs are off by 0.1" in world.log()
    before = world.client.stats()
    eval_id = request_eval(world.client, world.lineage, str(V2), 4).eval_id
    world.until(lambda: world.client.stats().num_rollouts > before.num_rollouts + 32, "rollouts of the version it has")
    assert world.client.get_eval(eval_id).num_done == 0
    num_returned = world.client.stats().leases["returned"] - before.leases["returned"]
    assert num_returned <= 8, "an evaluation that it cannot do came back again and again"  # 8: a request on its way

    assert sigterm(process) == 0
    stats = world.client.stats()
    assert stats.leases["open"] == 0
    assert stats.pushed["refused"] == stats.pushed["duplicate"] == 0
    assert (s := world.searcher()) is not None
    assert s.state == "ended"
    assert s.gauges["unpushed"] == 0
    assert s.gauges["rollouts_pushed"] == stats.num_rollouts


@pytest.mark.nightly
def test_a_missing_reward_service_a_restarting_buffer_and_a_clock_hours_off_are_waited_out(make_world, models):
    world: World = make_world()
    process = world.start_searcher(change=BEHIND)
    world.until(lambda: world.client.stats().num_pending >= 8, "pending rollouts")
    assert world.client.stats().num_scored == 0
    assert (s := world.searcher()) is not None
    assert s.gauges["scores_failed"] == 0
    world.start_reward()
    world.until(lambda: world.client.stats().num_scored >= 16, "scored rollouts")
    world.stack.buffer.kill()
    world.stack.buffer.start()
    before = world.client.stats().num_rollouts
    world.until(lambda: world.client.stats().num_rollouts > before + 32, "rollouts after the restart")
    publish_version(world.versions, models[1], V1, parent=START)
    world.announce(V1)
    world.until(lambda: (s := world.searcher()) and s.version == str(V1), "the version by the word of the buffer")
    stats = world.client.stats()
    assert stats.pushed["refused"] == 0
    assert stats.leases["expired"] == 0
    assert {round((time.time() - rollout.finished_at_s) / 3600) for rollout in drawn(world)} == {5}
    world.client.command("done", RunCommand(token=world.lineage.token))
    assert process.wait(timeout=TIMEOUT_S) == 0


@pytest.mark.nightly
def test_more_rollouts_per_visit_than_per_group_each_with_its_own_temperature_up_to_a_stop_string(make_world, models):
    world: World = make_world(
        sampling={"group_size": 4, "rollouts_per_visit": 10},
        searcher={
            "temperature_mix": {"low": 0.5, "high": 1.5},
            "max_response_tokens": 7,
            "tasks": {"addition": {"stop": ["1", "3", "7", "="]}},
        },
    )
    world.start_reward()
    process = world.start_searcher(change=AHEAD)
    world.until(lambda: world.client.stats().num_scored >= 80, "80 scored rollouts")
    rollouts = drawn(world)
    temperatures = [rollout.sampling.temperature for rollout in rollouts]
    assert len({rollout.rollout_id for rollout in rollouts}) == len(set(temperatures)) == 16
    assert 0.5 <= min(temperatures) < max(temperatures) < 1.5
    assert_trainer_agrees(rollouts, models[0])
    for rollout in rollouts:
        assert rollout.sampling.stop == ("1", "3", "7", "=")
        assert len(rollout.response_tokens) <= 7
        assert not set("137=") & set(rollout.response_text)
    assert {rollout.finish_reason for rollout in rollouts} >= {"stop_string", "length"}
    assert sigterm(process) == 0
    stats = world.client.stats()
    assert stats.leases["open"] == stats.leases["expired"] == 0
    assert stats.num_rollouts >= 10 * stats.leases["fulfilled"] >= 80


@pytest.mark.nightly
def test_prompts_that_are_too_long_are_refused_counted_and_never_cut(make_world):
    world: World = make_world(num_train=0, num_heldout=0)
    short = Prompt(prompt_id="short", task="addition", text="1+2=", data={"answer": 3})
    long = [Prompt(prompt_id=f"long-{i}", task="addition", text="1+2=" * 7, data={"answer": 3}) for i in range(40)]
    heldout = Prompt(prompt_id="heldout", task="addition", text="2+1=" * 7, data={"answer": 3}, split="heldout")
    world.client.upload_prompts([*long, short, heldout])
    world.start_reward()
    process = world.start_searcher()
    world.until(lambda: world.client.stats().num_scored >= 16, "rollouts of the short prompt")
    world.until(lambda: (s := world.searcher()) and s.gauges["refused_prompts"] >= 40, "40 refused prompts")
    stats = world.client.stats()
    assert stats.num_prompts_seen == 1
    assert stats.leases["refused"] >= 40
    assert world.log().count("prompt refused") == 40
    eval_id = request_eval(world.client, world.lineage, num_prompts=1).eval_id
    done = world.until(lambda: (i := world.client.get_eval(eval_id)).state == "done" and i, "the evaluation")
    assert done.num_unknown == 3
    assert done.accuracy is None
    assert sigterm(process) == 0


@pytest.mark.nightly
def test_visits_that_take_longer_than_their_lease_are_not_given_to_others(make_world):
    world: World = make_world(buffer={"lease_s": 6.0})  # less than scoring is retried
    process = world.start_searcher()  # there is no reward service: a visit waits for its scores
    world.until(lambda: world.client.stats().num_pending >= 8, "pending rollouts")
    stats = world.client.stats()
    assert stats.leases["granted"] > 2
    assert stats.leases["expired"] == 0
    process.kill()
    process.wait()
    client = world.client
    world.until(lambda: lease(client, 1) and client.stats().leases["expired"] > 0, "the leases of a dead searcher")


@pytest.mark.nightly
def test_sigterm_while_the_engine_starts_does_not_wait_for_it(make_world):
    world: World = make_world(searcher={"engine": "tests.support.odd_engines:LateEngine"})
    process = world.start_searcher()
    world.until(lambda: (s := world.searcher()) and s.state == "starting", "the start")
    world.until(lambda: "engine starts" in world.log(), "the engine")
    assert sigterm(process) == 0
    assert world.client.stats().leases["open"] == 0


@pytest.mark.nightly
def test_a_store_that_is_away_at_the_start_ends_the_searcher_at_the_deadline(make_world):
    world: World = make_world()
    root = Path(world.recipe.store.url.removeprefix("file://"))
    root.rename(root.with_suffix(".away"))
    process = world.start_searcher(change=IMPATIENT)
    assert process.wait(timeout=TIMEOUT_S) == 2
    assert "version not pulled" in world.log()
    assert "Traceback" not in world.log()


@pytest.mark.nightly
def test_a_drain_does_not_wait_for_a_step_that_does_not_come_back(make_world):
    world: World = make_world(searcher={"engine": "tests.support.odd_engines:HangingEngine", "drain_s": 1.0})
    process = world.start_searcher()
    world.until(lambda: "engine-step" in {wait.name for wait in world.client.run().waits}, "a named wait")
    assert world.client.stats().leases["open"] > 0
    assert sigterm(process) == 0
    assert world.client.stats().leases["open"] == 0


# ---- Evaluations: what it measures of each version reaches the buffer, and the best is kept --------------------------


def evaluate(world: World, version: PolicyVersion) -> EvalInfo:
    info = request_eval(world.client, world.lineage, str(version), 4)
    world.until(lambda: world.client.get_eval(info.eval_id).state == "done", f"the evaluation of {version}")
    return world.client.get_eval(info.eval_id)


def test_a_searcher_measures_success_and_diversity_of_exactly_the_pinned_version(make_world, models, tmp_path):
    section = {"num_samples": 6, "num_prompts": 4, "success_reward": 0.0, "pass_at": [2], "best_metric": "pass@2"}
    section["embedding_model"] = str(make_tiny_encoder(tmp_path / "encoder"))
    world: World = make_world(num_heldout=4, eval=section)
    world.start_reward()
    world.start_searcher()
    start = evaluate(world, START)
    other = PolicyVersion(1, 1)
    publish_version(world.versions, models[1], other, parent=START)
    world.announce(other)
    after = evaluate(world, other)
    best = world.client.run().best
    for info in (start, after):
        assert (info.accuracy, info.pass_at, info.num_unknown) == (1.0, {2: 1.0}, 0)
        assert info.distinct_1 is not None
        assert info.distinct_3 is not None
        assert 0 < info.distinct_1 < info.distinct_3 <= 1
        assert info.embedding_distance is not None
        assert 1e-3 < info.embedding_distance < 2
    assert best is not None
    assert (best.version, best.metric, best.value) == ("1-1", "pass@2", 1.0)  # of equal ones the newest
