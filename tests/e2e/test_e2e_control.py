"""One run that loses a searcher to kill -9, is paused, gets more searchers and loses them, and is stopped early."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest

from tba.api import RunInfo
from tests.e2e.conftest import MakePlace
from tests.support.e2e import (
    ENDLESS,
    Place,
    decode_all,
    freeze_when,
    open_leases,
    searchers_at_rest,
    stored_rollouts,
    trainer_at_rest,
    until,
)

ROLLOUTS_PER_VISIT = 4


@pytest.fixture(scope="module")
def place(make_place: MakePlace) -> Place:
    """A run with two searchers that ends on command; leases are short."""
    place = make_place(
        trainer={"num_steps": ENDLESS},
        sampling={"rollouts_per_visit": ROLLOUTS_PER_VISIT},
        searcher={"num_searchers": 2},
        buffer={"port": 0, "lease_s": 4.0},
    )
    place.start()
    place.until("both searchers push", lambda info: info.step >= 3 and len(pushing(info)) == 2)
    return place


def pushing(info: RunInfo) -> set[str]:
    """The searchers that are alive and have pushed."""
    found = (item for item in info.components if item.kind == "searcher" and item.alive and item.state == "running")
    return {item.component_id for item in found if item.gauges.get("rollouts_pushed", 0) > 0}


def test_a_killed_searcher_costs_nothing_but_its_open_leases_which_come_back(place: Place) -> None:
    client, redis_url = place.client(), place.redis_url()
    pid = place.pid("searcher-0")
    mine_now = lambda: open_leases(redis_url, "searcher-0")  # noqa: E731
    leases = freeze_when(pid, "open leases of searcher-0", client, mine_now, same=lambda leases: leases)
    before = stored_rollouts(redis_url)
    mine = {rollout.rollout_id for rollout in decode_all(before) if rollout.searcher_id == "searcher-0"}
    assert mine
    os.kill(pid, signal.SIGKILL)

    step = client.run().step
    place.until("training continues", lambda info: info.step >= step + 10)
    visits = {lease["v"] for lease in leases.values() if lease["k"] == "train"}

    def are_fulfilled() -> bool:
        num_stored = Counter(rollout.visit_id for rollout in decode_all(stored_rollouts(redis_url)))
        return all(num_stored[visit] >= ROLLOUTS_PER_VISIT for visit in visits)

    until("others fulfil the visits of the dead searcher", are_fulfilled)
    assert leases.keys().isdisjoint(open_leases(redis_url, "searcher-0"))
    assert client.stats().leases["expired"] >= len(leases)

    after = stored_rollouts(redis_url)
    assert {rollout_id: after.get(rollout_id) for rollout_id in before} == before
    # Redis has payloads and counters a moment before the index has them, and the run continues
    until("the index has what Redis had", lambda: client.stats().num_rollouts >= len(after))
    stats = client.stats()
    assert stats.num_rollouts <= stats.pushed["new"]
    until("the index has what was pushed", lambda: client.stats().num_rollouts >= stats.pushed["new"])
    later = client.stats()
    assert later.num_rollouts <= later.pushed["new"]
    assert later.pushed["refused"] == 0
    until("its death is said", lambda: "warning: searcher-0 died (killed by SIGKILL)" in place.started[-1].out)
    assert place.pid("searcher-0") != pid
    client.close()


def test_a_paused_run_makes_no_step_and_continues_when_told_to(place: Place) -> None:
    client = place.client()
    paused = place.control("pause", "--reason", "lunch")
    assert (paused.returncode, paused.stderr) == (0, "")
    assert "paused (lunch)" in paused.stdout
    place.until("both sides wait", lambda info: searchers_at_rest(info) and trainer_at_rest(info))
    still = (client.run().step, client.stats().rollouts_generated)
    before = client.run().latest_version  # the last step's may be announced only now
    exported = place.control("export", "--out", "exported")  # of a run that is going
    versions = {before, client.run().latest_version}
    assert any(exported.stdout.startswith(f"exported version {version} ") for version in versions), exported.stderr
    assert (place.path / "exported" / "model.safetensors").exists()
    for _ in range(8):
        time.sleep(0.25)
        assert (client.run().step, client.stats().rollouts_generated) == still
    assert place.control("resume").stdout.startswith("run 'tiny': running")
    place.until("training continues", lambda info: info.step >= still[0] + 5)
    client.close()


def test_searchers_come_and_go_while_the_trainer_trains(place: Place) -> None:
    up = place.control("scale", "3", "--reason", "night")
    assert up.returncode == 0, up.stderr
    assert "searchers: 3 desired (asked for by the operator), " in up.stdout
    place.until("all three push", lambda info: len(pushing(info)) == 3)
    redis_url = place.redis_url()
    before = stored_rollouts(redis_url)

    down = place.control("scale", "1")
    assert down.returncode == 0, down.stderr
    step = place.until("searcher-0 alone is left", lambda info: pushing(info) == {"searcher-0"}).step
    place.until("training continues", lambda info: info.step >= step + 5)
    out = place.started[-1]
    for name in ("searcher-1", "searcher-2"):  # drained, not lost
        until(f"{name} has ended", lambda name=name: f"{name} was stopped (exit code 0)" in out.out)
        assert not open_leases(redis_url, name)
    client = place.client()
    stats, info = client.stats(), client.scaling()
    client.close()
    assert stats.pushed["refused"] == 0
    after = stored_rollouts(redis_url)
    assert {rollout_id: after.get(rollout_id) for rollout_id in before} == before
    assert {rollout.searcher_id for rollout in decode_all(before)} == {f"searcher-{i}" for i in range(3)}
    assert [(change.old, change.new, change.reason) for change in info.changes] == [(None, 3, "night"), (3, 1, None)]


def test_a_stopped_run_ends_early_with_checkpoint_evaluation_and_model(place: Place) -> None:
    stopped = place.control("stop", "--reason", "enough")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    started = place.started[-1]
    assert started.wait() == 0, started.err + started.out
    assert started.err == ""
    summary = place.summary()
    assert summary["state"] == "done"
    assert summary["steps"] < ENDLESS
    assert summary["ledger_violations"] == []
    assert summary["final_accuracy"] is not None
    checkpoint = place.folder / "store" / "runs" / "tiny" / "checkpoints" / f"1-{summary['steps']}"
    assert (checkpoint / "manifest.json").exists()
    assert (place.folder / "model" / "model.safetensors").exists()
    assert place.pids() == []
    for child in ("buffer", "reward", "trainer", "searcher-0", "searcher-1"):
        assert "Traceback" not in place.log(child)
