"""Guards in the training loop: skipped steps, levers, pause, rollback, failure; over a recorded and a real buffer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_trainer.learner.learner import Learner
from tba_trainer.loop.batches import MAX_DAMAGED
from tba_trainer.trainer import train

from tba.api import RollbackRequest, RunCommand
from tba.errors import GuardError, MalformedError, SchemaVersionError, TbaError, UnavailableError, VoidBatchError
from tba.store import FileStore
from tba.wire import Batch, encode_rollout
from tba_cli.commands.report import check_command
from tba_cli.parser import parse_arguments
from tests.support.buffer import make_prompts
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.guards import make_guards
from tests.support.rollout_values import replace
from tests.support.trainer_values import changed, make_batch, make_recipe, make_rollout, recipe_of_buffer
from tests.support.trainer_world import World, failing, same
from tests.support.waits import DEADLINE_S, until

Change = Mapping[int, dict[str, float | None]]
Measured = Callable[..., None]
FINE: dict[str, float | None] = {"ess": 0.9, "log_ratio_token_mean": 0.0}
LOW: dict[str, float | None] = {"ess": 0.01}
ROLLBACK = {"non_finite": {"action": "rollback"}}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Makes the learner report such metrics where a step comes first, or always, and good ones elsewhere: the random
    rollouts of these tests have none. The gradients come from the batch."""
    gradients = Learner.gradients

    def change(changes: Change, *, always: bool = False) -> None:
        seen: dict[int, int] = {}

        def gradients_of(self: Learner, batch: Batch, *, step: int, policy_ages: Sequence[int], **kwargs: Any) -> Any:
            seen[step] = seen.get(step, 0) + 1
            metrics = gradients(self, batch, step=step, policy_ages=policy_ages, **kwargs) | FINE
            return metrics | (changes.get(step, {}) if always or seen[step] == 1 else {})

        monkeypatch.setattr(Learner, "gradients", gradients_of)

    return change


def recipe(model: Path, guards: dict[str, Any] | None = None, **trainer: Any) -> Any:
    usual = {"guards": make_guards(**guards or {}), "learning_rate": {"value": 1e-2}, "sync_interval": 1}
    return make_recipe(model, trainer={**usual, **trainer})


def without_rewards(batch: Batch) -> Batch:
    unscored = {"reward": None, "reward_status": "pending", "reward_version": None}
    return changed(batch, lambda _, rollout: replace(rollout, **unscored))


def test_a_step_that_is_not_finite_is_skipped_in_the_ledger(world: World, model: Path, measured: Measured) -> None:
    measured({3: {"loss": math.nan, "grad_norm": math.nan}})
    world.train(recipe(model))
    assert (world.buffer.state, world.skipped()) == ("done", {1: None, 2: None, 3: "non_finite", 4: None})
    assert world.buffer.acks[2][2].metrics["loss"] is None
    assert [ack.metrics["skipped"] for _, _, ack in world.buffer.acks] == [0.0, 0.0, 1.0, 0.0]
    assert [ack.metrics.get("alarm_non_finite") for _, _, ack in world.buffer.acks] == [None, None, 1.0, None]
    assert same(world.tensors("1-2"), world.tensors("1-3"))
    assert not same(world.tensors("1-3"), world.tensors("1-4"))
    assert world.buffer.beats[-1].gauges["alarms_non_finite"] == 1.0


@pytest.mark.parametrize("preset", ["tb", "tba_prime"])
def test_a_skipped_step_moves_schedules_alone(tmp_path: Path, model: Path, preset: str, measured: Measured) -> None:
    """The step after a skip is the same as in a run whose batch could not be used there, for any reason."""
    schedule = {"kind": "linear", "value": 1e-2, "final": 0.0, "steps": 8}
    objective = {"preset": preset} | ({"reference_reset_steps": 3} if preset == "tba_prime" else {})
    worlds = World(tmp_path / "alarm"), World(tmp_path / "refused")
    for world in worlds:
        settings = recipe(model, learning_rate=schedule, num_steps=5)
        settings = settings.model_copy(update={"objective": type(settings.objective).model_validate(objective)})
        if world is worlds[0]:
            measured({3: {"grad_norm": math.inf}})
        else:
            measured({})
            world.buffer.batch_of = lambda step: without_rewards(make_batch(step)) if step == 3 else make_batch(step)
        world.train(settings)
    assert (worlds[0].skipped()[3], worlds[1].skipped()[3]) == ("non_finite", "refused")
    assert (worlds[1].buffer.acks[2][2].refused, worlds[1].buffer.acks[2][2].policy_ages) == ({"no-reward": 12}, [])
    assert same(worlds[0].tensors("1-5"), worlds[1].tensors("1-5"))
    rates = [ack.metrics["learning_rate"] for _, _, ack in worlds[1].buffer.acks]
    assert rates == pytest.approx([1e-2 * (8 - i) / 8 for i in range(5)])


@pytest.mark.parametrize("rewards", [(1e308, -1e308), (1e9, -1e9)])
def test_rewards_of_any_size_leave_weights_finite(world: World, model: Path, rewards: tuple[float, float]) -> None:
    def batch_of(step: int) -> Batch:
        batch = make_batch(step)
        return changed(batch, lambda row, r: replace(r, reward=rewards[row % 2])) if step == 2 else batch

    world.buffer.batch_of = batch_of
    world.train(recipe(model))
    assert world.skipped()[2] == ("refused" if rewards[0] > 1e9 else None)
    assert all(torch.isfinite(tensor).all() for tensor in world.tensors("1-4").values())
    assert world.buffer.state == "done"


def test_too_many_skipped_batches_in_a_row_fail_the_run_which_a_restart_resumes(world: World, model: Path) -> None:
    settings = recipe(model, {"max_skipped_in_row": 2}, num_steps=9, checkpoint_interval=1)
    world.buffer.batch_of = lambda step: without_rewards(make_batch(step)) if step >= 3 else make_batch(step)
    with pytest.raises(GuardError, match=r"step 1-5: 3 batches in a row were skipped, .* because of 'refused'"):
        world.train(settings)
    assert world.buffer.state == "failed"
    assert "at most 2 may be" in str(world.buffer.reason)
    assert world.skipped() == {1: None, 2: None, 3: "refused", 4: "refused", 5: "refused"}
    world.buffer.batch_of = make_batch
    world.train(settings)
    assert (world.buffer.state, world.buffer.parents) == ("done", {1: "0-0", 2: "1-4"})


def test_samplers_with_another_model_fail_the_run_before_its_first_update(world: World, model: Path) -> None:
    with pytest.raises(GuardError, match=r"step 1-1: on_policy_gap: at policy age 0 .*a sliding window") as caught:
        world.train(make_recipe(model, searcher={"engine": "embedded"}))  # the log-probs of its rollouts are made up
    assert "learning_rate" not in str(caught.value)
    assert world.buffer.state == "failed"
    assert world.skipped() == {1: "on_policy_gap"}


def test_what_measures_the_temperatures_alone_is_no_alarm(tmp_path: Path, model: Path, measured: Measured) -> None:
    guards = {"ess_collapse": {"patience_steps": 1}, "log_ratio_drift": {"patience_steps": 1}}
    acting = {**guards, "log_ratio_drift": {"patience_steps": 1, "action": "skip"}}
    mix = {"temperature_mix": {"low": 0.5, "high": 2.0}}
    for name, alarms, searcher, expected in (
        ("same", guards, {}, {"ess_collapse", "log_ratio_drift"}),
        ("mix", guards, mix, set()),
        ("schedule", guards, {"sampling_temperature": 2.0}, set()),
        ("acting", acting, mix, {"log_ratio_drift"}),
    ):
        measured({2: {"ess": 0.01, "log_ratio_token_mean": -2.0}})
        world = World(tmp_path / name)
        world.train(make_recipe(model, trainer={"num_steps": 2, "guards": make_guards(**alarms)}, searcher=searcher))
        _, _, ack = world.buffer.acks[-1]
        assert {key.removeprefix("alarm_") for key in ack.metrics if key.startswith("alarm_")} == expected, name
        assert ack.metrics["ess"] == 0.01, "it is measured all the same"


def test_pause_skips_the_batch_and_the_run_waits_for_resume(world: World, model: Path, measured: Measured) -> None:
    measured({2: LOW})
    paused: list[str | None] = []

    def look_and_resume() -> None:
        if world.buffer.state == "paused":
            paused.append(world.buffer.reason)
            world.buffer.state, world.buffer.reason = "running", None

    world.at("draw_batch", look_and_resume)
    world.train(recipe(model, {"ess_collapse": {"patience_steps": 1, "action": "pause"}}))
    assert world.buffer.state == "done"
    assert paused == ["step 1-2: ess_collapse: the effective sample size is 0.010 of the batch, below 0.1"]
    assert world.skipped() == {1: None, 2: "ess_collapse", 3: None, 4: None}


@pytest.mark.parametrize(("bad_step", "back_to"), [(6, 4), (5, 2)])
def test_rollback_to_a_good_step(tmp_path: Path, model: Path, measured: Measured, bad_step: int, back_to: int) -> None:
    """Fed the same batches, the run ends with the weights of a run in which nothing was wrong."""
    guards = {**ROLLBACK, "grad_spike": {"window_steps": 4, "factor": 1000.0}}
    settings = recipe(model, guards, num_steps=7, checkpoint_interval=2)
    smooth, bumpy = World(tmp_path / "smooth"), World(tmp_path / "bumpy")
    smooth.train(settings)
    measured({bad_step: {"grad_norm": math.nan}})
    bumpy.train(settings)
    buffer = bumpy.buffer
    assert (buffer.state, buffer.parents) == ("done", {1: "0-0", 2: f"1-{back_to}"})
    assert [(lineage, step, ack.skipped) for lineage, step, ack in buffer.acks] == [
        *((1, step, None) for step in range(1, bad_step)),
        (1, bad_step, "non_finite"),
        *((2, step, None) for step in range(back_to + 1, 8)),
    ]
    assert same(smooth.tensors("1-7"), bumpy.tensors("2-7"))
    assert (buffer.beats[-1].gauges["rollbacks"], buffer.beats[-1].gauges["alarms_non_finite"]) == (1.0, 1.0)


def test_a_crash_after_a_rollback_leads_to_no_suspect(world: World, model: Path, measured: Measured) -> None:
    measured({5: {"grad_norm": math.nan}})
    settings = recipe(model, ROLLBACK, num_steps=6, checkpoint_interval=2)
    world.train_until_killed(settings, "ack", lineage=2)
    assert world.buffer.checkpoint == ("1-2", "runs/demo/checkpoints/1-2")  # 1-4 was, which no good step followed
    world.train(settings)
    assert (world.buffer.state, world.buffer.parents) == ("done", {1: "0-0", 2: "1-2", 3: "1-2"})


def test_a_crash_after_a_rollback_to_the_start_forgets_nothing(world: World, model: Path, measured: Measured) -> None:
    measured({3: {"grad_norm": math.nan}})
    settings = recipe(model, {**ROLLBACK, "max_rollbacks": 1}, num_steps=4, checkpoint_interval=2)
    world.train_until_killed(settings, "run", lineage=2)  # nothing but the lineage itself has been asked for
    assert world.buffer.checkpoint is None  # 1-2 was: the only checkpoint
    measured({3: {"grad_norm": math.nan}})
    with pytest.raises(GuardError, match="rollbacks so far: 1, and"):
        world.train(settings)
    assert world.buffer.parents == {1: "0-0", 2: "0-0", 3: "0-0"}


def test_why_a_run_fails_is_raised_where_nobody_can_be_told(world: World, model: Path, measured: Measured) -> None:
    measured({2: LOW})
    world.buffer.before = failing(9, lambda: UnavailableError("the buffer is away"), "command:fail")
    guards = {"ess_collapse": {"patience_steps": 1, "action": "fail"}}
    with pytest.raises(GuardError, match=r"step 1-2: ess_collapse: the effective sample size is"):
        world.train(recipe(model, guards))
    assert world.buffer.state == "running"


def test_an_evaluation_that_a_rollback_cut_off_is_asked_again(world: World, model: Path, measured: Measured) -> None:
    measured({4: {"loss": math.nan}})
    settings = recipe(model, ROLLBACK, num_steps=8, checkpoint_interval=2, sync_interval=3)
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"every_steps": 2})})
    world.train(settings)
    assert world.buffer.parents == {1: "0-0", 2: "1-2"}
    asked = [name for name in world.buffer.evals if name.startswith("eval-2-")]  # 1-3 may have been cut off
    assert asked == ["eval-2-3", "eval-2-6", "eval-2-8"]


def test_too_many_rollbacks_without_a_checkpoint_fail(world: World, model: Path, measured: Measured) -> None:
    measured({2: {"loss": math.inf}}, always=True)
    settings = recipe(model, {**ROLLBACK, "max_rollbacks": 2})
    with pytest.raises(GuardError, match=r"step 3-2: non_finite: .*; rollbacks so far: 2, and"):
        world.train(settings)
    assert (world.buffer.parents, world.buffer.state) == ({1: "0-0", 2: "0-0", 3: "0-0"}, "failed")
    assert [(lineage, step) for lineage, step, _ in world.buffer.acks] == [(n, s) for n in (1, 2, 3) for s in (1, 2)]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_checkpoint_of_a_rollback_survives_more(world: World, model: Path, measured: Measured, keep: int) -> None:
    """Step 5 is never finite: the checkpoint of step 4 is suspect each time, and 1-2 is the only one to go back to."""
    measured({5: {"loss": math.inf}}, always=True)
    guards = {**ROLLBACK, "max_rollbacks": 3}
    settings = recipe(model, guards, num_steps=6, checkpoint_interval=2, keep_checkpoints=keep)
    with pytest.raises(GuardError, match=r"a run may have no more.* continues from checkpoint 1-2: no good step"):
        world.train(settings)
    assert (world.buffer.parents, world.checkpoints()) == ({1: "0-0", 2: "1-2", 3: "1-2", 4: "1-2"}, ["1-2", "4-4"])


def test_a_rollback_whose_older_checkpoints_are_gone_fails(world: World, model: Path, measured: Measured) -> None:
    measured({5: {"grad_norm": math.nan}})
    world.at("ack", lambda: world.store.delete("runs/demo/checkpoints/1-2/manifest.json"), step=4)
    settings = recipe(model, ROLLBACK, num_steps=6, checkpoint_interval=2)
    with pytest.raises(GuardError, match=r"from checkpoint 1-4, .* \(the last one was 1-2\) are gone or damaged"):
        world.train(settings)
    assert (world.buffer.state, world.buffer.parents) == ("failed", {1: "0-0"})


def test_a_run_that_fails_by_skipping_continues_from_a_good_one(world: World, model: Path, measured: Measured) -> None:
    """Skipping writes checkpoints of the same bad weights, at steps 4 to 6: a start continues from none of them."""
    bad = dict.fromkeys((4, 5, 6, 7), LOW)
    measured(bad, always=True)
    guards = {"ess_collapse": {"patience_steps": 1, "action": "skip"}, "max_skipped_in_row": 3}
    settings = recipe(model, guards, num_steps=8, checkpoint_interval=1, keep_checkpoints=2)
    sentence = r"4 batches in a row were skipped, .* continues from checkpoint 1-2: no good step followed 1-6; consider"
    with pytest.raises(GuardError, match=sentence):
        world.train(settings)
    assert world.buffer.checkpoint == ("1-2", "runs/demo/checkpoints/1-2")
    bad.clear()
    world.train(settings)
    assert (world.buffer.parents, world.buffer.state) == ({1: "0-0", 2: "1-2"}, "done")
    assert world.checkpoints() == ["2-7", "2-8"]


def test_a_failed_run_says_that_its_only_one_is_suspect(world: World, model: Path, measured: Measured) -> None:
    measured({2: LOW})
    guards = {"ess_collapse": {"patience_steps": 1, "action": "fail"}}
    with pytest.raises(GuardError, match=r"step 1-2: ess_collapse: the effective sample size is 0\.010 of") as caught:
        world.train(recipe(model, guards, checkpoint_interval=1))
    assert "from checkpoint 1-1, the only one, which no good step followed; consider" in str(caught.value)
    assert (world.buffer.checkpoint, world.buffer.state) == (("1-1", "runs/demo/checkpoints/1-1"), "failed")
    assert world.skipped() == {1: None, 2: "ess_collapse"}


def test_no_checkpoint_is_registered_while_such_an_alarm_is_on(world: World, model: Path, measured: Measured) -> None:
    """The condition holds from step 4 on and rolls back at step 6. Step 4 measures the weights of step 3, so the
    run must not go back to them either."""
    measured(dict.fromkeys((4, 5, 6), LOW))
    guards = {"ess_collapse": {"patience_steps": 3, "action": "rollback"}}
    world.train(recipe(model, guards, num_steps=7, checkpoint_interval=1))
    assert (world.buffer.parents, world.buffer.state) == ({1: "0-0", 2: "1-2"}, "done")


def test_sigterm_while_such_an_alarm_is_on_leaves_a_good_one(world: World, model: Path, measured: Measured) -> None:
    measured({3: LOW})
    guards = {"ess_collapse": {"patience_steps": 3, "action": "rollback"}}
    settings = recipe(model, guards, num_steps=6, checkpoint_interval=1)
    world.stop_after(3)
    world.train(settings)
    assert world.buffer.checkpoint == ("1-2", "runs/demo/checkpoints/1-2")
    world.train(settings)
    assert (world.buffer.parents, world.buffer.state) == ({1: "0-0", 2: "1-2"}, "done")


def test_a_run_that_really_diverges_fails(world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 throws the weights so far away that every later gradient is NaN: nothing more is applied or kept. A large
    learning rate alone does that on some CPUs and not on others."""
    take_step, taken = torch.optim.AdamW.step, list[torch.optim.AdamW]()

    def step(optimizer: torch.optim.AdamW, *args: Any) -> Any:
        result = take_step(optimizer, *args)
        if not taken:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.data.mul_(1e25)
        taken.append(optimizer)
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    settings = recipe(model, {"max_skipped_in_row": 4}, num_steps=30, checkpoint_interval=2)
    with pytest.raises(GuardError, match=r"step 1-6: non_finite: the loss is .* 5 batches in a row were skipped"):
        world.train(settings)
    assert (world.buffer.state, world.buffer.checkpoint) == ("failed", None)
    assert world.skipped() == {1: None} | dict.fromkeys(range(2, 7), "non_finite")
    for version in world.buffer.marks:
        assert all(torch.isfinite(tensor).all() for tensor in world.tensors(version).values())


def test_guards_remember_through_a_checkpoint(world: World, model: Path, measured: Measured) -> None:
    """Two of three bad steps before SIGTERM, the third after it: the alarm goes off as if nothing had happened."""
    measured(dict.fromkeys((2, 3, 4), LOW))
    settings = recipe(model, {"ess_collapse": {"patience_steps": 3, "action": "skip"}}, num_steps=5)
    world.stop_after(3)
    world.train(settings)
    world.train(settings)
    assert world.skipped() == {1: None, 2: None, 3: None, 4: "ess_collapse", 5: None}


def test_a_void_batch_leaves_the_guards_as_they_were(world: World, model: Path, measured: Measured) -> None:
    measured({2: LOW})
    refuse = failing(1, lambda: VoidBatchError("batch-2 is void"), "ack")
    world.buffer.before = lambda method: refuse(method) if world.buffer.step == 1 else None
    world.train(recipe(model, {"ess_collapse": {"patience_steps": 1, "action": "skip"}}))
    assert world.skipped() == {1: None, 2: None, 3: None, 4: None}
    assert world.buffer.beats[-1].gauges["alarms_ess_collapse"] == 0.0


def test_an_answer_that_is_no_batch_is_counted_and_asked_for_again(world: World, model: Path) -> None:
    world.buffer.before = failing(MAX_DAMAGED - 1, lambda: MalformedError("batch: not msgpack"), "draw_batch")
    world.train(recipe(model, num_steps=3))
    assert (world.buffer.state, world.buffer.beats[-1].gauges["num_damaged_batches"]) == ("done", MAX_DAMAGED - 1)


def test_answers_that_are_never_a_batch_end_with_what_to_do(world: World, model: Path) -> None:
    world.buffer.before = failing(99, lambda: SchemaVersionError("batch: schema 2 is not one"), "draw_batch")
    sentence = r"5 answers in a row to the request for the batch of step 1 were not a batch \(batch: schema 2 is"
    with pytest.raises(TbaError, match=sentence):
        world.train(recipe(model))
    assert world.buffer.acks == []


def test_pause_and_rollback_over_a_real_buffer(
    serve_buffer: ServeBuffer, model: Path, tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 7 rolls back to 1-5. The second lineage pauses at step 9, and an operator goes back to 1-5 again."""
    measured({7: {"loss": math.nan, "grad_norm": math.nan}, 9: {"ess": 0.01}})
    served = serve_buffer(store={"url": f"file://{tmp_path / 'store'}"})
    client, rng = served.client(), np.random.default_rng(0)
    client.upload_prompts(make_prompts(8, 4))
    rollouts = [make_rollout(rng, prompt_id=f"train-{i % 8}", run="test", reward=float(i % 3)) for i in range(48)]
    client.push([encode_rollout(rollout) for rollout in rollouts])
    guards = make_guards(non_finite={"action": "rollback"}, ess_collapse={"patience_steps": 1, "action": "pause"})
    settings = recipe_of_buffer(served.recipe, model, guards=guards, num_steps=10, checkpoint_interval=5, export=False)
    services: dict[str, Any] = {"buffer": served.client(retry_s=120.0), "store": FileStore(tmp_path / "store")}
    services["stop"] = threading.Event()
    trainer = threading.Thread(target=train, args=(settings,), kwargs=services, daemon=True)
    trainer.start()
    until("the run is paused", lambda: client.run().state == "paused" or not trainer.is_alive())
    assert str(client.run().state_reason).startswith("step 2-9: ess_collapse: ")
    client.rollback(RollbackRequest(step=8))
    until("its weights are there", lambda: client.run().latest_version == "3-5" or not trainer.is_alive())
    paused = client.run()
    assert (paused.state, paused.rollback, paused.num_rollbacks) == ("paused", None, 1)
    client.command("resume", RunCommand())
    trainer.join(timeout=DEADLINE_S)
    done = client.run()
    assert (done.state, done.step, done.parents) == ("done", 10, {1: "0-0", 2: "1-5", 3: "1-5"})
    assert check_command(parse_arguments(["ledger", "check", "--url", served.url])) == 0
    assert "16 batches, 6 of them abandoned, 2 skipped, trainer starts: 3" in capsys.readouterr().out
