"""Runs that begin with another run's rollouts: offline training from a saved buffer, and a fork."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from safetensors.torch import load_file

from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import decode_rollout
from tba_cli.run_folder import RunFolder
from tests.e2e.conftest import MakePlace
from tests.support.e2e import RUN, Place, stored_rollouts
from tests.support.stored_checkpoint import section_tensors

NUM_STEPS, FORKED_AT, NUM_MORE = 12, PolicyVersion(1, 6), 4


@pytest.fixture(scope="module")
def ended(make_place: MakePlace) -> Place:
    """A run that has ended, with a checkpoint of the version that is forked and no other of its kind; its versions are
    deltas."""
    rate = {"value": 1e-4}
    place = make_place(
        model={"dtype": "bfloat16"},
        trainer={"num_steps": NUM_STEPS, "sync_interval": 2, "checkpoint_interval": 6, "keep_checkpoints": 5}
        | {"learning_rate": rate},
    )
    started = place.start()
    assert started.wait() == 0, started.err + started.out
    return place


def test_versions_are_stored_as_deltas_and_searchers_and_exports_take_them(ended: Place, tmp_path: Path) -> None:
    versions = WeightVersions(FileStore(folder_of(ended, RUN).store_path), RUN)
    steps = range(2, NUM_STEPS + 1, 2)
    assert not any(versions.manifest(PolicyVersion(1, step)).is_full for step in steps)
    log = ended.log("searcher-0")
    assert "weights_route_failed" not in log
    assert "version refused" not in log
    exported = ended.control("export", "--version", str(FORKED_AT), "--out", str(tmp_path / "old"))
    assert (exported.returncode, exported.stderr) == (0, "")
    trained = section_tensors(folder_of(ended, RUN).store_path, f"runs/{RUN}/checkpoints/{FORKED_AT}", "model")
    for name, tensor in load_file(tmp_path / "old/model.safetensors").items():
        assert torch.equal(tensor, trained[name].bfloat16())


def folder_of(place: Place, run: str) -> RunFolder:
    return RunFolder(place.path / "runs" / run)


def summary_of(place: Place, run: str) -> dict[str, Any]:
    return json.loads(folder_of(place, run).summary_path.read_text())


def rollouts_of(place: Place, run: str) -> dict[bytes, bytes]:
    with place.redis_of_ended_run(run) as redis:
        return stored_rollouts(redis.url, run)


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


def tensors_of(place: Place, run: str, version: PolicyVersion, path: Path) -> dict[str, torch.Tensor]:
    versions = WeightVersions(FileStore(folder_of(place, run).store_path), run)
    return load_file(versions.download_tensors(version, path / f"{run}-{version}").paths[0])


def test_a_run_without_searchers_trains_on_the_saved_buffer_of_a_run_that_has_ended(ended: Place) -> None:
    saved = ended.tba("buffer", "save", "end", RUN)
    assert saved.returncode == 0, saved.stderr
    assert f"saved {RUN}/end" in saved.stdout
    assert not folder_of(ended, RUN).endpoints_path.exists()
    words = ("--run-name", "offline", "--buffer", f"{RUN}/end", "--set", "searcher.num_searchers=0")
    started = ended.start(*words, "--set", f"trainer.num_steps={NUM_MORE}")
    assert started.wait() == 0, started.err + started.out
    summary = summary_of(ended, "offline")
    assert (summary["state"], summary["steps"], summary["ledger_violations"]) == ("done", NUM_MORE, [])
    assert (summary["rollouts_generated"], summary["rollouts_trained"]) == (0, NUM_MORE * 16)
    assert (summary["start_accuracy"], summary["final_accuracy"]) == (None, None)
    assert "no searchers" in summary["not_evaluated"]
    assert "not evaluated" in started.out
    assert (summary["began_with"], summary["forked_from"]) == (f"{RUN}/end", None)
    before, after = rollouts_of(ended, RUN), rollouts_of(ended, "offline")
    assert before.keys() == after.keys()
    assert {decode_rollout(payload).run for payload in after.values()} == {"offline"}
    assert ended.tba("buffer", "save", "end", RUN).returncode == 2, "a snapshot is never overwritten"


def test_a_run_without_searchers_and_without_rollouts_is_refused_at_once(ended: Place) -> None:
    started = ended.start("--run-name", "nothing", "--set", "searcher.num_searchers=0")
    assert started.wait() == 2
    assert "nothing would ever be generated" in started.err
    assert not folder_of(ended, "nothing").path.exists()
    unknown = ended.start("--run-name", "nothing", "--buffer", f"{RUN}/nowhere")
    assert unknown.wait() == 2
    assert f"there is no snapshot {RUN}/nowhere" in unknown.err


def test_a_fork_continues_from_a_version_with_what_arrived_before_its_mark(ended: Place, tmp_path: Path) -> None:
    late = ended.tba("run", "--fork", f"{RUN}@1-7", "--run-name", "late")
    assert late.returncode == 2
    assert "has no weight version 1-7" in late.stderr
    early = ended.tba(
        "run", "--fork", f"{RUN}@{FORKED_AT}", "--run-name", "early", "--set", f"trainer.num_steps={FORKED_AT.step}"
    )
    assert early.returncode == 2
    assert "its steps count from there" in early.stderr
    store = FileStore(folder_of(ended, RUN).store_path)
    assert not [key for key in store.list(f"runs/{RUN}/") if f"/fork-{FORKED_AT}/" in key], "nothing was saved for it"

    num_more = NUM_MORE + 1  # `samples_per_insert_error` allows NUM_MORE batches before new rollouts come
    last = FORKED_AT.step + num_more
    forked = ended.tba(
        "run", "--fork", f"{RUN}@{FORKED_AT}", "--run-name", "forked", "--set", f"trainer.num_steps={last}"
    )
    assert forked.returncode == 0, forked.stderr + forked.stdout
    summary = summary_of(ended, "forked")
    assert (summary["state"], summary["steps"], summary["ledger_violations"]) == ("done", last, [])
    assert summary["rollouts_trained"] == num_more * 16
    assert summary["forked_from"] == str(FORKED_AT)
    assert 0 <= summary["start_accuracy"] <= 1
    assert 0 <= summary["final_accuracy"] <= 1
    parent, first = (
        tensors_of(ended, RUN, FORKED_AT, tmp_path),
        tensors_of(ended, "forked", PolicyVersion(2, FORKED_AT.step), tmp_path),
    )
    assert all(torch.equal(tensor, first[name]) for name, tensor in parent.items())
    assert "forked_without_checkpoint" not in (folder_of(ended, "forked").log_path("trainer")).read_text()
    history = json.loads(folder_of(ended, "forked").history_path.read_text())
    assert history["info"]["parents"] == {"1": "0-0", "2": str(FORKED_AT)}
    before, after = arrived_before(ended, FORKED_AT), rollouts_of(ended, "forked").keys()
    assert 0 < len(before) < len(rollouts_of(ended, RUN)), "the mark is in the middle"
    assert after & rollouts_of(ended, RUN).keys() == before
    assert len(after) > len(before), "and new ones were sampled"
