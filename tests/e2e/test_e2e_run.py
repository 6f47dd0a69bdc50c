"""`tba run` from recipe to report, and runs that begin with another one, in real processes; the recipe is tiny."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis
from safetensors.torch import load_file
from tba_trainer.learner.learner import Learner
from tba_trainer.model.policy import load_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.api import LedgerEntry
from tba.config import parse_recipe
from tba.config.sections import StoreSection
from tba.store import open_store
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Rollout, decode_rollout
from tba_cli.main import main
from tests.e2e.conftest import MakePlace
from tests.support.e2e import RUN, Place, decode_all
from tests.support.rollout_values import replace
from tests.support.s3_server import s3_with_bucket
from tests.support.stored_checkpoint import section_tensors

NUM_STEPS, BATCH_ROLLOUTS, LAG_STEPS = 20, 16, 3
LORA = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}
FORKED_AT, NUM_MORE = PolicyVersion(1, 6), 4
KEYS = {
    *("start_accuracy", "final_accuracy", "start_greedy", "final_greedy", "train_s", "first_step_s"),
    *("trainer_wait_share", "steps", "rollouts_generated", "rollouts_trained", "policy_age_histogram"),
}


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


@pytest.fixture(scope="module")
def finished(make_place: MakePlace) -> Place:
    """A recorded run, with a checkpoint of the version that is forked and few others; its versions are deltas."""
    trainer = {
        "num_steps": NUM_STEPS,
        "checkpoint_interval": 6,
        "keep_checkpoints": 5,
        "learning_rate": {"value": 1e-4},
    }
    tracking = {"tensorboard_dir": "tensorboard"}
    return make_place(model={"dtype": "bfloat16"}, trainer=trainer, tracking=tracking).finish()


def test_a_run_ends_with_a_summary_that_adds_up(finished: Place) -> None:
    summary = check_summary(finished)
    ledger = finished.ledger()
    assert [(entry.lineage, entry.step, entry.abandoned) for entry in ledger] == [
        (1, step, False) for step in range(1, NUM_STEPS + 1)
    ]
    assert {entry.num_rollouts for entry in ledger} == {BATCH_ROLLOUTS}
    rollouts = decode_all(finished.rollouts())
    assert len(rollouts) == summary["rollouts_generated"]
    tokens = summary["tokens"]
    assert tokens["generated"] == sum(len(rollout.response_tokens) for rollout in rollouts)
    assert tokens["trained"] > 0
    # training was counted, whatever the start and the end of the services took
    assert summary["component_seconds"]["trainer"] >= 0.5 * summary["train_s"]
    said = [line for line in finished.started[0].out.splitlines() if line.startswith("first batch: ")]
    mean = f" of task 'exact', mean reward {ledger[0].metrics['reward_mean']:.3g} "
    assert [line.partition(" answers to ")[0] for line in said] == [f"first batch: {BATCH_ROLLOUTS}"]
    assert mean in said[0]
    assert {(rollout.run, rollout.reward_status) for rollout in rollouts} == {(RUN, "scored")}
    assert {rollout.reward for rollout in rollouts} <= {0.0, 1.0}


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    return json.loads(found.out)


def test_what_commands_say_of_a_run_is_there_as_json(finished: Place, capsys, tmp_path) -> None:
    where = ("--run-dir", str(finished.folder))
    ledger = answer(capsys, "ledger", "check", *where)
    assert (ledger["run"], ledger["num_steps"], ledger["violations"]) == (RUN, NUM_STEPS, [])
    (row,) = answer(capsys, "table", str(finished.folder))
    assert row["run"] == RUN
    saved = answer(capsys, "buffer", "save", "end", *where)
    assert saved["source"] == f"{RUN}/end"
    exported = answer(capsys, "rollouts", "export", *where, "--out", str(tmp_path / "all.parquet"))
    assert (exported["num_rollouts"], exported["num_evicted"]) == (saved["num_rollouts"], 0)


def test_the_exported_model_loads_and_is_the_last_published_version(finished: Place, model: Path, tmp_path) -> None:
    exported: Any = AutoModelForCausalLM.from_pretrained(finished.folder / "model")
    parameters = dict(exported.named_parameters())
    last = finished.tensors(f"1-{NUM_STEPS}", tmp_path)
    assert parameters.keys() == last.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in last.items())
    first = finished.tensors("0-0", tmp_path)
    assert any(not torch.equal(first[name], tensor) for name, tensor in last.items())
    tokenizer = AutoTokenizer.from_pretrained(finished.folder / "model")
    assert tokenizer("47+85=")["input_ids"] == AutoTokenizer.from_pretrained(model)("47+85=")["input_ids"]


def test_the_best_version_is_named_and_can_be_exported_after_the_run(finished: Place, capsys, tmp_path) -> None:
    summary = finished.summary()
    best = summary["best_version"]
    assert (summary["best_metric"], 0 <= summary["best_value"] <= 1) == ("accuracy", True)
    words = ("--version", "best", "--out", str(tmp_path / "best"))
    exported = answer(capsys, "export", *words, "--run-dir", str(finished.folder))
    assert (exported["out"], exported["version"]) == (str(tmp_path / "best"), best)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    published = finished.tensors(best, tmp_path)
    assert all(torch.equal(parameter, published[name]) for name, parameter in loaded.named_parameters())
    card = (tmp_path / "best" / "README.md").read_text()
    assert f"# {RUN}, version {best}" in card
    assert f"# {RUN}, version 1-{NUM_STEPS}" in (finished.folder / "model" / "README.md").read_text()


def test_metrics_jsonl_and_tensorboard_have_the_start_every_step_and_every_evaluation(finished: Place) -> None:
    lines = [json.loads(text) for text in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["parent"] for line in lines if line["kind"] == "start"] == ["0-0"]
    steps = [(line["lineage"], line["step"]) for line in lines if line["kind"] == "step"]
    assert steps == [(1, step) for step in range(1, NUM_STEPS + 1)]
    evaluated = {line["eval_id"] for line in lines if line["kind"] == "evaluation"}
    history = json.loads((finished.folder / "history.json").read_text())
    assert evaluated == {info["eval_id"] for info in history["info"]["evals"]}
    assert list((finished.folder / "tensorboard").glob("events.out.tfevents.*"))


def test_versions_are_stored_as_deltas_and_searchers_and_exports_take_them(finished: Place, tmp_path: Path) -> None:
    versions = finished.versions()
    steps = range(2, NUM_STEPS + 1, 2)
    assert not any(versions.manifest(PolicyVersion(1, step)).is_full for step in steps)
    log = finished.log("searcher-0")
    assert "weights_route_failed" not in log
    assert "version refused" not in log
    exported = finished.control("export", "--version", str(FORKED_AT), "--out", str(tmp_path / "old"))
    assert (exported.returncode, exported.stderr) == (0, "")
    trained = section_tensors(finished.folder / "store", f"runs/{RUN}/checkpoints/{FORKED_AT}", "model")
    for name, tensor in load_file(tmp_path / "old/model.safetensors").items():
        assert torch.equal(tensor, trained[name].bfloat16())


def arrived_before(place: Place, version: PolicyVersion) -> set[bytes]:
    """Ids of the rollouts of the first run that are before the mark of a version in its log."""
    found: set[bytes] = set()
    with place.redis_of_ended_run() as redis, Redis.from_url(redis.url) as client:
        entries: Any = client.xrange(f"tba:{RUN}:log")
    for _, fields in entries:
        if fields.get(b"m") == f"{version.lineage} {version.step}".encode():
            return found
        records = fields.get(b"r", b"")
        found |= {records[at : at + 16] for at in range(0, len(records), 57)}
    raise AssertionError(f"there is no mark of {version}")


@pytest.mark.nightly
def test_a_run_without_searchers_trains_on_the_saved_buffer_of_a_run_that_has_ended(finished: Place) -> None:
    saved = finished.tba("buffer", "save", "all", RUN)
    assert saved.returncode == 0, saved.stderr
    assert f"saved {RUN}/all" in saved.stdout
    assert not (finished.folder / "endpoints.json").exists()
    words = ("--run-name", "offline", "--buffer", f"{RUN}/all", "--set", "searcher.num_searchers=0")
    started = finished.start(*words, "--set", f"trainer.num_steps={NUM_MORE}")
    assert started.wait() == 0, started.err + started.out
    summary = finished.summary("offline")
    assert (summary["state"], summary["steps"], summary["ledger_violations"]) == ("done", NUM_MORE, [])
    assert (summary["rollouts_generated"], summary["rollouts_trained"]) == (0, NUM_MORE * 16)
    assert (summary["start_accuracy"], summary["final_accuracy"]) == (None, None)
    assert "no searchers" in summary["not_evaluated"]
    assert "not evaluated" in started.out
    assert (summary["began_with"], summary["forked_from"]) == (f"{RUN}/all", None)
    before, after = finished.rollouts(), finished.rollouts("offline")
    assert before.keys() == after.keys()
    assert {decode_rollout(payload).run for payload in after.values()} == {"offline"}
    assert finished.tba("buffer", "save", "all", RUN).returncode == 2, "a snapshot is never overwritten"


@pytest.mark.nightly
def test_a_fork_continues_from_a_version_with_what_arrived_before_its_mark(finished: Place, tmp_path: Path) -> None:
    num_more = NUM_MORE + 1  # `samples_per_insert_error` allows NUM_MORE batches before new rollouts come
    last = FORKED_AT.step + num_more
    forked = finished.tba(
        "run", "--fork", f"{RUN}@{FORKED_AT}", "--run-name", "forked", "--set", f"trainer.num_steps={last}"
    )
    assert forked.returncode == 0, forked.stderr + forked.stdout
    summary = finished.summary("forked")
    assert (summary["state"], summary["steps"], summary["ledger_violations"]) == ("done", last, [])
    assert summary["rollouts_trained"] == num_more * 16
    assert summary["forked_from"] == str(FORKED_AT)
    assert 0 <= summary["start_accuracy"] <= 1
    assert 0 <= summary["final_accuracy"] <= 1
    parent = finished.tensors(str(FORKED_AT), tmp_path)
    first = finished.tensors(f"2-{FORKED_AT.step}", tmp_path, "forked")
    assert all(torch.equal(tensor, first[name]) for name, tensor in parent.items())
    assert "forked_without_checkpoint" not in (finished.path / "runs/forked/logs/trainer.log").read_text()
    history = json.loads((finished.path / "runs/forked/history.json").read_text())
    assert history["info"]["parents"] == {"1": "0-0", "2": str(FORKED_AT)}
    before, after = arrived_before(finished, FORKED_AT), finished.rollouts("forked").keys()
    assert 0 < len(before) < len(finished.rollouts()), "the mark is in the middle"
    assert after & finished.rollouts().keys() == before
    assert len(after) > len(before), "and new ones were sampled"


@pytest.fixture(scope="module")
def s3_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_with_bucket(tmp_path_factory.mktemp("s3"), "weights") as server:
        yield {"url": "s3://weights/some/prefix", "endpoint_url": server.url}


@pytest.fixture(scope="module")
def alternating(make_place: MakePlace, s3_store: dict[str, str]) -> Place:
    """Both baselines in one run with LoRA, over an S3 server: it alternates with a lag, and its rewards are shuffled;
    and its searchers compute the log-probs of the reference."""
    sampling = {"alternate": True, "lag_steps": LAG_STEPS, "max_uses": 1, "most_on_policy_prob": 1.0}
    trainer = {"shuffle_rewards": True, "sync_interval": 1, "keep_versions": 2, "learning_rate": {"value": 1e-2}}
    objective = {"preset": "tb", "beta": 0.1, "reference_placement": "searcher"}
    place = make_place(
        store=s3_store,
        model={"policy_temperature": 0.8},
        objective=objective,
        searcher={"num_searchers": 2},
        sampling=sampling,
        trainer=trainer,
    )
    return place.finish("--set", f"model.lora={json.dumps(LORA).replace(':', ' =')}")


def test_a_run_with_adapters_goes_to_the_end_over_an_s3_server_as_a_plain_model(
    alternating: Place, make_place: MakePlace, s3_store: dict[str, str], tmp_path: Path
) -> None:
    versions = WeightVersions(open_store(StoreSection.model_validate(s3_store)), RUN)
    kinds = {str(version): versions.manifest(version).adapter is not None for version in versions.versions()}
    assert kinds == {name: name != "0-0" for name in kinds}
    assert f"1-{NUM_STEPS}" in kinds
    start, last = (
        load_file(versions.download_tensors(version, tmp_path / str(version)).paths[0])
        for version in (START, PolicyVersion(1, NUM_STEPS))
    )
    moved = {name.split(".")[-2] for name in start if not torch.equal(start[name], last[name])}
    assert moved == {"q_proj", "v_proj"}
    exported: Any = AutoModelForCausalLM.from_pretrained(alternating.folder / "model")
    assert all(torch.equal(parameter, last[name]) for name, parameter in exported.named_parameters())
    assert not (alternating.folder / "store").exists()
    again = make_place(store=s3_store).start()
    assert again.wait() == 2
    assert "already holds" in again.err
    assert again.err.count("\n") == 1


def test_a_run_that_alternates_or_shuffles_rewards_goes_to_the_end(alternating: Place) -> None:
    check_summary(alternating)


def test_an_alternating_run_never_generates_while_it_trains(alternating: Place) -> None:
    rollouts = decode_all(alternating.rollouts())
    assert overlaps(rollouts, alternating.ledger()) == []


def test_with_a_constant_lag_every_rollout_is_trained_on_at_that_age(alternating: Place) -> None:
    ages = {e.step: (e.metrics["policy_age_mean"], e.metrics["policy_age_max"]) for e in alternating.ledger()}
    assert ages == {step: (min(step - 1, LAG_STEPS),) * 2 for step in range(1, NUM_STEPS + 1)}


def test_searchers_compute_the_ref_log_probs_and_the_trainer_trains_with_them(alternating: Place) -> None:
    ledger = alternating.ledger()
    assert all(entry.metrics["kl_to_ref"] is not None for entry in ledger)
    assert {entry.num_rollouts for entry in ledger} == {BATCH_ROLLOUTS}  # none was refused
    assert any(entry.metrics["grad_norm"] for entry in ledger)
    rollouts = decode_all(alternating.rollouts())
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
