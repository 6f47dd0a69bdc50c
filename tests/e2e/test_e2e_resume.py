"""One run that loses its trainer to kill -9, is resumed, is stopped with all its processes, is resumed again, and ends.

The tests look at three starts of one run, in order; what they compare was noted while it ran.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tba.api import RunInfo
from tba.versions import PolicyVersion
from tests.e2e.conftest import MakePlace
from tests.support.e2e import ENDLESS, RUN, SET_FALLING_BETA, Place, falling_beta, freeze_when, stands_at, whole_ledger
from tests.support.stored_checkpoint import section_tensors

CHECKPOINT_INTERVAL = 5
NUM_MORE_STEPS = 12


Story = SimpleNamespace
"""The observations along the way."""


def step_of(version: str | None) -> int:
    assert version is not None
    return PolicyVersion.parse(version).step


def stopped_step(place: Place) -> int:
    """The last checkpoint of lineage 2 that is complete."""
    folder = place.folder / "store" / "runs" / RUN / "checkpoints"
    return max(step_of(path.parent.name) for path in folder.glob("2-*/manifest.json"))


def is_past_a_checkpoint(info: RunInfo) -> RunInfo | None:
    return info if info.checkpoint is not None and info.step > step_of(info.checkpoint) else None


@pytest.fixture(scope="module")
def story(make_place: MakePlace) -> Story:
    trainer = {"num_steps": ENDLESS, "checkpoint_interval": CHECKPOINT_INTERVAL, "keep_checkpoints": 10_000}
    place = make_place(trainer=trainer)
    killed = place.start()
    place.until("a checkpoint and a step", is_past_a_checkpoint)
    changed = place.control("set", "learning_rate=2e-5", SET_FALLING_BETA, "most_on_policy_prob=1")
    assert changed.returncode == 0, changed.stderr
    client, pid = place.client(), place.pid("trainer")
    past = lambda: is_past_a_checkpoint(client.run())  # noqa: E731
    at_kill = freeze_when(pid, "a step after the checkpoint", client, past, same=stands_at)
    settings = [client.settings()]
    client.close()
    assert at_kill is not None
    os.kill(pid, signal.SIGKILL)
    killed.wait()
    left_after_kill = place.pids()

    interrupted = place.start("--resume")
    resumed_info = place.until("steps of lineage 2", lambda info: info.lineage == 2 and info.step >= at_kill.step + 3)
    check = place.control("ledger", "check")
    assert check.returncode == 0, check.stdout + check.stderr
    client = place.client()
    resumed_ledger = whole_ledger(client)
    settings.append(client.settings())
    client.close()
    # as systemd, SLURM and the end of a login session do it: all processes at once, here those that must end last first
    for pid in (*sorted(place.pids()), interrupted.process.pid):
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    interrupted.wait()
    left_after_interrupt = place.pids()

    latest = [str(place.versions().versions()[-1])]
    away = (place.folder / "redis").rename(place.path / "redis")
    refused = place.start("--resume")
    refused.wait()
    latest.append(str(place.versions().versions()[-1]))
    shutil.rmtree(place.folder / "redis")
    away.rename(place.folder / "redis")
    num_steps = stopped_step(place) + NUM_MORE_STEPS
    finished = place.start("--resume", "--set", f"trainer.num_steps={num_steps}")
    finished.wait()
    return Story(
        place=place,
        killed=killed,
        at_kill=at_kill,
        settings=settings,  # at the kill, and in the lineage after it
        left_after_kill=left_after_kill,
        resumed_ledger=resumed_ledger,
        resumed_info=resumed_info,
        ledger_check=check.stdout,
        interrupted=interrupted,
        left_after_interrupt=left_after_interrupt,
        refused=refused,
        latest=latest,
        finished=finished,
        num_steps=num_steps,
    )


def test_a_killed_trainer_ends_the_run_with_one_sentence_that_says_how_to_continue(story: Story) -> None:
    assert story.killed.process.returncode == 1
    assert story.killed.err.count("\n") == 1
    assert story.killed.err.startswith("error: trainer died (killed by SIGKILL)")
    assert story.killed.err.endswith("-m tba_cli.main run recipe.json --resume\n")
    assert story.left_after_kill == []


def test_a_resume_continues_in_a_new_lineage_right_after_the_checkpoint(story: Story) -> None:
    parent = story.at_kill.checkpoint
    assert story.resumed_info.parents == {1: "0-0", 2: parent}
    made = [entry for entry in story.resumed_ledger if entry.lineage == 2]
    assert [entry.step - step_of(parent) for entry in made][:3] == [1, 2, 3]
    assert "every step of the active lineage exactly once" in story.ledger_check


def test_live_settings_hold_in_the_new_lineage(story: Story) -> None:
    before, after = story.settings
    assert (after.settings, after.recipe, after.changes) == (before.settings, before.recipe, before.changes)
    assert [audit.changes.keys() for audit in after.changes] == [{"learning_rate", "beta", "most_on_policy_prob"}]
    for entry in (entry for entry in story.resumed_ledger if entry.lineage == 2):
        assert (entry.settings_revision, entry.metrics["learning_rate"]) == (1, 2e-5)
        assert (entry.metrics["beta"], entry.most_on_policy_prob) == (falling_beta(entry), 1.0)


def test_what_the_dead_lineage_did_after_its_checkpoint_is_marked_abandoned_and_nothing_else(story: Story) -> None:
    abandoned = [(entry.lineage, entry.step) for entry in story.resumed_ledger if entry.abandoned]
    after = range(step_of(story.at_kill.checkpoint) + 1, story.at_kill.step + 1)
    assert len(after) > 0
    assert abandoned == [(1, step) for step in after]


def test_weights_and_optimizer_continue_from_the_checkpoint(story: Story, tmp_path: Path) -> None:
    store = story.place.folder / "store"
    parent = step_of(story.at_kill.checkpoint)
    checkpoints = f"runs/{RUN}/checkpoints"
    weights = section_tensors(store, f"{checkpoints}/1-{parent}", "model")
    first = story.place.tensors(f"2-{parent}", tmp_path)
    assert first.keys() == weights.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in weights.items())
    # AdamW counts its updates: a fresh one would start from 0 again. Its moments are compared in tests/integration.
    for name, steps in ((f"1-{parent}", parent), (f"3-{story.num_steps}", story.num_steps)):
        optimizer = section_tensors(store, f"{checkpoints}/{name}", "optimizer")
        assert {int(tensor) for key, tensor in optimizer.items() if key.startswith("step.")} == {steps}


def test_a_stop_of_all_processes_exits_130_leaves_none_and_loses_no_step(story: Story) -> None:
    assert story.interrupted.process.returncode == 130
    assert story.interrupted.err == ""
    assert "-m tba_cli.main run recipe.json --resume" in story.interrupted.out
    assert story.left_after_interrupt == []
    stopped_at = max(entry.step for entry in story.place.ledger() if entry.lineage == 2)
    assert stopped_at == story.num_steps - NUM_MORE_STEPS == stopped_step(story.place)
    assert not any(entry.abandoned for entry in story.place.ledger() if entry.lineage == 2)


def test_a_redis_that_holds_nothing_of_the_run_is_refused_and_nothing_begins_again(story: Story) -> None:
    assert story.refused.process.returncode == 2
    assert "holds nothing of it" in story.refused.err
    assert story.latest[0] == story.latest[1]
    assert story.finished.process.returncode == 0, "the data of Redis was put back"


def test_the_run_ends_with_every_step_exactly_once(story: Story) -> None:
    assert story.finished.process.returncode == 0, story.finished.err + story.finished.out
    summary = story.place.summary()
    assert (summary["state"], summary["steps"], summary["lineages"]) == ("done", story.num_steps, 3)
    assert (summary["num_starts"], summary["ledger_violations"]) == (4, [])
    active = [entry.step for entry in story.place.ledger() if not entry.abandoned]
    assert active == list(range(1, story.num_steps + 1))
    assert summary["rollouts_trained"] == 16 * len(story.place.ledger())
    assert sum(summary["policy_age_histogram"].values()) == summary["rollouts_trained"]
    assert story.place.pids() == []
    for child in ("buffer", "reward", "trainer", "searcher-0"):
        assert "Traceback" not in story.place.log(child)
