"""One run that loses a searcher to kill -9, is paused, gets other settings and more searchers, and is stopped early."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections import Counter

import pytest

from tba.api import LedgerEntry, RunInfo, SettingsAudit, SettingsInfo
from tba.versions import PolicyVersion
from tba.wire import Rollout
from tba_cli.main import main
from tests.e2e.conftest import MakePlace
from tests.support.e2e import (
    ENDLESS,
    SET_FALLING_BETA,
    Place,
    decode_all,
    falling_beta,
    freeze_when,
    open_leases,
    searchers_at_rest,
    stored_rollouts,
    trainer_at_rest,
    until,
    whole_ledger,
)

ROLLOUTS_PER_VISIT = 4
RATE, BETA, TEMPERATURE = 1e-4, 0.2, 1.1
"""Values of the recipe; m is 0."""


@pytest.fixture(scope="module")
def place(make_place: MakePlace) -> Place:
    """A run with two searchers that ends on command; leases are short."""
    place = make_place(
        trainer={"num_steps": ENDLESS, "learning_rate": RATE},
        objective={"preset": "tb", "beta": BETA},
        sampling={"rollouts_per_visit": ROLLOUTS_PER_VISIT, "most_on_policy_prob": 0.0},
        searcher={"num_searchers": 2, "sampling_temperature": TEMPERATURE},
        eval={"every_steps": ENDLESS, "num_prompts": 4, "num_prompts_final": 4},
        buffer={"port": 0, "lease_s": 4.0},
    )
    place.start()
    place.until("both searchers push", lambda info: info.step >= 3 and len(pushing(info)) == 2)
    return place


def pushing(info: RunInfo) -> set[str]:
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


class Control:
    def __init__(self, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
        self._place, self._capsys = place, capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run the command and return its output: that on stderr if the command is meant to fail."""
        self._capsys.readouterr()
        found = main([*words, "--run-dir", str(self._place.folder)])
        output = self._capsys.readouterr()
        assert found == code, output
        return output.err if code else output.out

    def set_and_see(self, *words: str) -> SettingsAudit:
        """`tba set`, and the change once a step was made with it."""
        revision = json.loads(self("set", *words, "--json"))["revision"]
        until(f"{words} in effect", lambda: any(e.settings_revision >= revision for e in ledger(self._place)))
        (audit,) = (c for c in read_settings(self._place).changes if c.revision == revision)
        return audit


def read_settings(place: Place) -> SettingsInfo:
    with contextlib.closing(place.client()) as client:
        return client.settings()


def ledger(place: Place) -> list[LedgerEntry]:
    with contextlib.closing(place.client()) as client:
        return whole_ledger(client)


def first_step(place: Place, audit: SettingsAudit) -> int:
    return min(entry.step for entry in ledger(place) if entry.settings_revision >= audit.revision)


def rollouts(place: Place) -> list[Rollout]:
    return decode_all(stored_rollouts(place.redis_url()))


@pytest.mark.timeout(900)
def test_live_settings_change_a_run_and_are_shown(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    control = Control(place, capsys)
    trained = rate_and_beta_change_together_at_one_step(place, control)
    the_others_change_where_they_act(place, control)
    they_are_shown(place, control, trained)
    back = control.set_and_see("learning_rate=recipe")
    place.until("steps with it", lambda info: info.step > first_step(place, back))
    assert ledger(place)[-1].metrics["learning_rate"] == RATE


def rate_and_beta_change_together_at_one_step(place: Place, control: Control) -> SettingsAudit:
    audit = control.set_and_see("learning_rate=2e-5", SET_FALLING_BETA, "--reason", "diverges")
    assert (audit.role, audit.reason, audit.lineage) == ("operator", "diverges", 1)
    first = first_step(place, audit)
    assert first > audit.step
    place.until("steps with it", lambda info: info.step >= first + 3)
    for entry in ledger(place):
        changed = entry.step >= first
        assert entry.metrics["learning_rate"] == (2e-5 if changed else RATE)
        assert entry.metrics["beta"] == (falling_beta(entry) if changed else BETA)
        assert entry.settings_revision == (audit.revision if changed else 0)
    return audit


def the_others_change_where_they_act(place: Place, control: Control) -> None:
    """m at a batch, the sampling temperature at a visit, the interval of evaluations at a step."""
    before = {rollout.rollout_id for rollout in rollouts(place)}
    audit = control.set_and_see("most_on_policy_prob=1", "sampling_temperature=0.6", "eval_every_steps=4")
    eval_first = first_step(place, audit)
    place.until("a batch with m", lambda _: any(entry.most_on_policy_prob == 1.0 for entry in ledger(place)))
    m_first = next(entry.step for entry in ledger(place) if entry.most_on_policy_prob == 1.0)
    assert m_first > audit.step
    info = place.until("evaluations", lambda info: sum(item.state == "done" for item in info.evals) >= 3)
    steps = [PolicyVersion.parse(item.version).step for item in info.evals[1:]]
    assert steps[0] >= eval_first
    assert all(step % 4 == 0 for step in steps)
    place.until("steps with m", lambda info: info.step >= m_first + 3)
    for entry in ledger(place):
        slots = entry.slots
        assert entry.most_on_policy_prob == (1.0 if entry.step >= m_first else 0.0)
        assert slots["recent"] + slots["fallback"] == (slots["total"] if entry.step >= m_first else 0)
    until("rollouts at 0.6", lambda: any(r.sampling.temperature == 0.6 for r in rollouts(place)))
    seen = {(r.rollout_id in before, r.sampling.temperature) for r in rollouts(place)}
    assert (True, TEMPERATURE) in seen
    assert seen <= {(True, TEMPERATURE), (False, TEMPERATURE), (False, 0.6)}


def they_are_shown(place: Place, control: Control, trained: SettingsAudit) -> None:
    revision = read_settings(place).revision
    assert f"changed settings (revision {revision}): learning_rate 2e-05 (recipe: 0.0001)" in control("status")
    highest, shown, lowest = read_settings(place), control("set"), read_settings(place)
    found = re.search(rf"beta: linear 0\.4 to 0\.2 over {ENDLESS} steps \(recipe: 0\.2\), now (\S+)", shown)
    assert found, shown
    assert lowest.now["beta"] - 1e-6 <= float(found[1]) <= highest.now["beta"] + 1e-6 < BETA * 2 + 1e-6
    assert "learning_rate: 2e-05 (recipe: 0.0001), now 2e-05" in shown
    assert f"revision {trained.revision}, by the operator" in shown
    assert "(diverges)" in shown
    assert "'policy_temperature' (value 0.7) cannot change" in control("set", "policy_temperature=0.7", code=2)
    assert "beta cannot be 0" in control("set", "beta=0", code=2)


def test_a_stopped_run_ends_early_with_checkpoint_evaluation_and_model(place: Place) -> None:
    stopped = place.control("stop", "--reason", "enough")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    started = place.started[-1]
    assert started.wait() == 0, started.err + started.out
    assert started.err == ""
    summary = place.summary()
    assert summary["state"] == "done"
    assert summary["steps"] < ENDLESS
    assert (summary["ledger_violations"], summary["settings_changed"]) == ([], 3)
    assert summary["final_accuracy"] is not None
    checkpoint = place.folder / "store" / "runs" / "tiny" / "checkpoints" / f"1-{summary['steps']}"
    assert (checkpoint / "manifest.json").exists()
    assert (place.folder / "model" / "model.safetensors").exists()
    assert place.pids() == []
    for child in ("buffer", "reward", "trainer", "searcher-0", "searcher-1"):
        assert "Traceback" not in place.log(child)
