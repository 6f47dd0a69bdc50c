"""One run whose five live settings are changed while it trains; then all is killed, and it continues with them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from typing import Any

import pytest

from tba.api import LedgerEntry, SettingsAudit, SettingsInfo
from tba.config import Schedule
from tba.versions import PolicyVersion
from tba.wire import Rollout
from tba_cli.main import main
from tests.e2e.conftest import MakePlace
from tests.support.e2e import ENDLESS, Place, decode_all, stored_rollouts, until, whole_ledger

RATE, BETA, TEMPERATURE = 1e-4, 0.2, 1.1
"""Values of the recipe; m is 0."""
FALLING = Schedule(kind="linear", value=0.4, final=0.2, steps=ENDLESS)
"""beta is set to it: it changes at every step, however many steps the run makes."""


class Control:
    """`tba` commands for a run, called in this process."""

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


def rollouts(place: Place) -> list[Rollout]:
    return decode_all(stored_rollouts(place.redis_url()))


def where(place: Place, audit: SettingsAudit, lineage: int = 1) -> int:
    """The first step of `lineage` that was made with a change."""
    made = (e for e in ledger(place) if e.lineage == lineage and e.settings_revision >= audit.revision)
    return min(entry.step for entry in made)


def falling_beta(entry: LedgerEntry) -> Any:
    """Return the value of FALLING for a step; it differs from the value of the step before."""
    return pytest.approx(FALLING.at(entry.step - 1), rel=1e-9)


@pytest.mark.timeout(900)
def test_live_settings_change_a_run_are_shown_and_hold_after_everything_was_killed(
    make_place: MakePlace, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_place(
        trainer={"num_steps": ENDLESS, "learning_rate": RATE, "checkpoint_interval": 10},
        objective={"preset": "tb", "beta": BETA},
        sampling={"most_on_policy_prob": 0.0},
        searcher={"sampling_temperature": TEMPERATURE},
        eval={"every_steps": ENDLESS, "num_prompts": 4, "num_prompts_final": 4},
    )
    control = Control(place, capsys)
    place.start()
    place.until("some steps", lambda info: info.step >= 3)
    trained = rate_and_beta_change_together_at_one_step(place, control)
    the_others_change_where_they_act(place, control)
    they_are_shown(place, control, trained)
    after_a_kill_the_run_continues_with_them(place, trained)
    the_recipe_comes_back_and_the_run_ends_well(place, control)


def rate_and_beta_change_together_at_one_step(place: Place, control: Control) -> SettingsAudit:
    beta = f'beta={{kind="linear", value={FALLING.value}, final={FALLING.final}, steps={FALLING.steps}}}'
    audit = control.set_and_see("learning_rate=2e-5", beta, "--reason", "diverges")
    assert (audit.role, audit.reason, audit.lineage) == ("operator", "diverges", 1)
    first = where(place, audit)
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
    eval_first = where(place, audit)
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


def after_a_kill_the_run_continues_with_them(place: Place, trained: SettingsAudit) -> None:
    place.until("a checkpoint and a step", lambda info: info.checkpoint is not None and info.step % 10 > 2)
    before = read_settings(place)
    for pid in place.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    place.started[-1].wait()
    until("all of them gone", lambda: not place.pids())

    place.start("--resume")
    info = place.until("steps of lineage 2", lambda info: info.lineage == 2 and info.step >= 3)
    parent = PolicyVersion.parse(info.parents[2])
    place.until("more of them", lambda info: info.step >= parent.step + 3)
    after = read_settings(place)
    assert (after.revision, after.settings, after.recipe) == (before.revision, before.settings, before.recipe)
    assert [audit.changes for audit in after.changes] == [audit.changes for audit in before.changes]
    for entry in (entry for entry in ledger(place) if entry.lineage == 2):
        assert entry.metrics["learning_rate"] == 2e-5
        assert entry.metrics["beta"] == falling_beta(entry)
        assert (entry.most_on_policy_prob, entry.settings_revision) == (1.0, before.revision)
    assert where(place, trained, lineage=2) == parent.step + 1


def the_recipe_comes_back_and_the_run_ends_well(place: Place, control: Control) -> None:
    back = control.set_and_see("learning_rate=recipe")
    changed_from = where(place, back, lineage=2)
    place.until("steps with it", lambda info: info.step > changed_from)
    assert ledger(place)[-1].metrics["learning_rate"] == RATE
    control("stop")
    assert place.started[-1].wait() == 0, place.started[-1].err
    summary = place.summary()
    assert (summary["ledger_violations"], summary["settings_changed"]) == ([], back.revision)
