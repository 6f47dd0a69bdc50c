"""`tba run` from recipe to report: every process is real; only the recipe is tiny."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.learner.learner import Learner
from tba_trainer.model.policy import load_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.api import LedgerEntry
from tba.config import parse_recipe
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Rollout
from tba_cli.main import main
from tests.e2e.conftest import MakePlace
from tests.support.e2e import RUN, Place, decode_all, stored_rollouts
from tests.support.s3_server import CREDENTIALS, S3Server

NUM_STEPS, BATCH_ROLLOUTS, LAG_STEPS = 20, 16, 3
KEYS = {
    *("start_accuracy", "final_accuracy", "start_greedy", "final_greedy", "train_s", "first_step_s"),
    *("trainer_wait_share", "steps", "rollouts_generated", "rollouts_trained", "policy_age_histogram"),
}


def run_to_the_end(place: Place, *words: str) -> Place:
    started = place.start(*words)
    assert started.wait() == 0, started.err + started.out
    assert started.err == ""
    return place


def check_summary(place: Place) -> dict[str, Any]:
    """Check the facts that are true for every finished run; return the summary."""
    summary = place.summary()
    assert summary.keys() >= KEYS
    assert summary["state"] == "done"
    assert (summary["steps"], summary["lineages"], summary["ledger_violations"]) == (NUM_STEPS, 1, [])
    assert summary["rollouts_trained"] == NUM_STEPS * BATCH_ROLLOUTS
    assert sum(summary["policy_age_histogram"].values()) == summary["rollouts_trained"]
    assert min(map(int, summary["policy_age_histogram"])) >= 0
    assert max(map(int, summary["policy_age_histogram"])) < NUM_STEPS
    for name in ("start_accuracy", "final_accuracy", "start_greedy", "final_greedy", "trainer_wait_share"):
        assert 0 <= summary[name] <= 1, name
    assert (summary["num_heldout_prompts"], summary["num_unknown_scores"]) == (16, 0)
    assert summary["train_s"] > 0
    assert summary["first_step_s"] > 0
    assert place.pids() == []
    for child in ("buffer", "reward", "trainer", "searcher-0"):
        assert "Traceback" not in place.log(child)
    return summary


def published_tensors(place: Place, version: PolicyVersion, path: Path) -> dict[str, torch.Tensor]:
    versions = WeightVersions(FileStore(place.folder / "store"), RUN)
    return load_file(versions.download_tensors(version, path / str(version)).paths[0])


@pytest.fixture(scope="module")
def finished(make_place: MakePlace) -> Place:
    return run_to_the_end(make_place())


def test_a_run_ends_with_a_summary_that_adds_up(finished: Place) -> None:
    summary = check_summary(finished)
    ledger = finished.ledger()
    assert [(entry.lineage, entry.step, entry.abandoned) for entry in ledger] == [
        (1, step, False) for step in range(1, NUM_STEPS + 1)
    ]
    assert {entry.num_rollouts for entry in ledger} == {BATCH_ROLLOUTS}
    with finished.redis_of_ended_run() as redis:
        rollouts = decode_all(stored_rollouts(redis.url))
    assert len(rollouts) == summary["rollouts_generated"]
    tokens = summary["tokens"]
    assert tokens["generated"] == sum(len(rollout.response_tokens) for rollout in rollouts)
    assert tokens["trained"] > 0
    # training was counted, whatever the start and the end of the services took
    assert summary["component_seconds"]["trainer"] >= 0.5 * summary["train_s"]
    assert {(rollout.run, rollout.reward_status) for rollout in rollouts} == {(RUN, "scored")}
    assert {rollout.reward for rollout in rollouts} <= {0.0, 1.0}


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    return json.loads(found.out)


def test_what_commands_say_of_a_run_is_there_as_json(
    finished: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ("--run-dir", str(finished.folder))
    ledger = answer(capsys, "ledger", "check", *where)
    assert (ledger["run"], ledger["num_steps"], ledger["violations"]) == (RUN, NUM_STEPS, [])
    (row,) = answer(capsys, "table", str(finished.folder))
    assert row["run"] == RUN
    saved = answer(capsys, "buffer", "save", "end", *where)
    assert saved["source"] == f"{RUN}/end"
    exported = answer(capsys, "rollouts", "export", *where, "--out", str(tmp_path / "all.parquet"))
    assert (exported["num_rollouts"], exported["num_evicted"]) == (saved["num_rollouts"], 0)


def test_the_exported_model_loads_and_is_the_last_published_version(
    finished: Place, model: Path, tmp_path: Path
) -> None:
    exported: Any = AutoModelForCausalLM.from_pretrained(finished.folder / "model")
    parameters = dict(exported.named_parameters())
    last = published_tensors(finished, PolicyVersion(1, NUM_STEPS), tmp_path)
    assert parameters.keys() == last.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in last.items())
    first = published_tensors(finished, START, tmp_path)
    assert any(not torch.equal(first[name], tensor) for name, tensor in last.items())
    tokenizer = AutoTokenizer.from_pretrained(finished.folder / "model")
    assert tokenizer("47+85=")["input_ids"] == AutoTokenizer.from_pretrained(model)("47+85=")["input_ids"]


def test_the_best_version_is_named_and_can_be_exported_after_the_run(
    finished: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = finished.summary()
    best = summary["best_version"]
    assert (summary["best_metric"], 0 <= summary["best_value"] <= 1) == ("accuracy", True)
    words = ("--version", "best", "--out", str(tmp_path / "best"))
    exported = answer(capsys, "export", *words, "--run-dir", str(finished.folder))
    assert (exported["out"], exported["version"]) == (str(tmp_path / "best"), best)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    published = published_tensors(finished, PolicyVersion.parse(best), tmp_path)
    assert all(torch.equal(parameter, published[name]) for name, parameter in loaded.named_parameters())
    card = (tmp_path / "best" / "README.md").read_text()
    assert f"# {RUN}, version {best}" in card
    assert f"# {RUN}, version 1-{NUM_STEPS}" in (finished.folder / "model" / "README.md").read_text()


@pytest.fixture(scope="module")
def s3_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The section of a bucket on an S3 server."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        try:
            server.start()
            server.create_bucket("weights")
            yield {"url": "s3://weights/some/prefix", "endpoint_url": server.url}
        finally:
            server.kill()


@pytest.fixture(scope="module")
def alternating(make_place: MakePlace, s3_store: dict[str, str]) -> Place:
    """Both baselines in one run, over an S3 server: it alternates with a lag, and its rewards are shuffled; and its
    searchers compute the log-probs of the reference."""
    sampling = {"alternate": True, "lag_steps": LAG_STEPS, "max_uses": 1, "most_on_policy_prob": 1.0}
    trainer = {"shuffle_rewards": True, "sync_interval": 1, "keep_versions": 2}
    objective = {"preset": "tb", "beta": 0.1, "reference_placement": "searcher"}
    place = make_place(
        store=s3_store,
        model={"policy_temperature": 0.8},
        objective=objective,
        searcher={"num_searchers": 2},
        sampling=sampling,
        trainer=trainer,
    )
    return run_to_the_end(place)


def test_a_run_goes_to_the_end_over_an_s3_server(
    alternating: Place, make_place: MakePlace, s3_store: dict[str, str]
) -> None:
    AutoModelForCausalLM.from_pretrained(alternating.folder / "model")
    assert not (alternating.folder / "store").exists()
    again = make_place(store=s3_store).start()
    assert again.wait() == 2
    assert "already holds" in again.err
    assert again.err.count("\n") == 1


def test_a_run_that_alternates_or_shuffles_rewards_goes_to_the_end(alternating: Place) -> None:
    check_summary(alternating)


def test_an_alternating_run_never_generates_while_it_trains(alternating: Place) -> None:
    with alternating.redis_of_ended_run() as redis:
        rollouts = decode_all(stored_rollouts(redis.url))
    assert overlaps(rollouts, alternating.ledger()) == []


def test_with_a_constant_lag_every_rollout_is_trained_on_at_that_age(alternating: Place) -> None:
    ages = {e.step: (e.metrics["policy_age_mean"], e.metrics["policy_age_max"]) for e in alternating.ledger()}
    assert ages == {step: (min(step - 1, LAG_STEPS),) * 2 for step in range(1, NUM_STEPS + 1)}


def test_searchers_compute_the_ref_log_probs_and_the_trainer_trains_with_them(alternating: Place) -> None:
    ledger = alternating.ledger()
    assert all(entry.metrics["kl_to_ref"] is not None for entry in ledger)
    assert {entry.num_rollouts for entry in ledger} == {BATCH_ROLLOUTS}  # none was refused
    assert any(entry.metrics["grad_norm"] for entry in ledger)
    with alternating.redis_of_ended_run() as redis:
        rollouts = decode_all(stored_rollouts(redis.url))
    assert {r.version for r in rollouts} > {START}  # later versions have the same reference
    carried = [r.ref_logprob for r in rollouts]
    assert all(ref is not None and ref.version == START for ref in carried)
    recipe = parse_recipe({**alternating.recipe, "objective": {"preset": "tb"}}, where="test")
    policy = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    theirs = Learner(policy, recipe, np.random.default_rng(0)).reference
    expected = theirs.logprobs([replace(r, ref_logprob=None) for r in rollouts])
    assert expected is not None
    assert theirs.num_computed == len(rollouts)
    assert [ref.value for ref in carried if ref is not None] == pytest.approx(
        [float(values.sum()) for values in expected], abs=1e-4
    )


def overlaps(rollouts: list[Rollout], ledger: list[LedgerEntry]) -> list[tuple[float, float, int]]:
    """Return the times at which a rollout was sampled while a step was computed, on the one clock of this machine."""
    steps = [(entry.acked_at_s - (entry.metrics["step_s"] or 0.0), entry.acked_at_s, entry.step) for entry in ledger]
    return [
        (rollout.started_at_s, rollout.finished_at_s, step)
        for rollout in rollouts
        for begun_s, ended_s, step in steps
        if rollout.started_at_s < ended_s and rollout.finished_at_s > begun_s
    ]
