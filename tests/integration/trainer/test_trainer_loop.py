"""The whole trainer over a recorded buffer and a real store: publishing, checkpoints, resume, failures, fencing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import EndpointConnectionError
from tba_trainer.loop import limits

from tba.api import RunInfo
from tba.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    FencedError,
    OlderRedisError,
    RunFailedError,
    StoreUnavailableError,
    TbaError,
    UnavailableError,
    VoidBatchError,
    WaitTimeoutError,
)
from tba.versions import PolicyVersion
from tests.support.stored_checkpoint import object_keys
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import RecordedBuffer, make_recipe, make_repeating_batch
from tests.support.trainer_world import World, at_put, failing, raising, refuse_puts, same


def test_a_run_publishes_in_order_checkpoints_evaluates_exports_and_is_done(world: World, model: Path) -> None:
    world.train(make_recipe(model, trainer={"num_steps": 5, "sync_interval": 2, "checkpoint_interval": 3}))
    buffer = world.buffer
    assert (buffer.state, [str(v) for v in world.versions.versions()]) == ("done", ["0-0", "1-2", "1-4", "1-5"])
    assert buffer.marks == ["0-0", "1-2", "1-4", "1-5"]
    assert [world.versions.manifest(v).parent for v in world.versions.versions()] == [None, "0-0", "1-2", "1-4"]
    assert [(lineage, step) for lineage, step, _ in buffer.acks] == [(1, s) for s in range(1, 6)]
    names = "loss reward_mean accuracy policy_age_mean policy_age_max ess log_ratio_mean kl_to_ref grad_norm beta"
    names += " wait_s learning_rate num_tokens step_s train_s num_unique_rollouts"
    assert all(ack.metrics.keys() >= set(names.split()) for _, _, ack in buffer.acks)
    ages = [(ack.policy_ages, ack.metrics["logprob_gap_on_policy"] is None) for _, _, ack in buffer.acks]
    assert ages == [([age] * 12, age > 0) for age in range(5)]
    assert buffer.checkpoint == ("1-5", "runs/demo/checkpoints/1-5")
    assert list(buffer.evals) == ["eval-0-0", "eval-1-2", "eval-1-4", "eval-1-5"]
    assert [buffer.evals[f"eval-{v}"].num_prompts for v in ("0-0", "1-2", "1-5")] == [512, 128, 512]
    exported = {key.rpartition("/")[2] for key in world.store.list("runs/demo/export/")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= exported


@pytest.mark.parametrize("preset", ["tb", "tba_prime", "tba_prime_published"])
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_never_stopped(tmp_path: Path, model: Path, preset: str) -> None:
    """Batches repeat rollouts, so that the reference cache matters; the reference is reset on the way."""
    recipe = make_recipe(
        model,
        trainer={"num_steps": 8, "sync_interval": 3, "shuffle_rewards": True, "learning_rate": {"value": 1e-2}},
        objective={"preset": preset, "beta": 0.1} | ({"reference_reset_steps": 3} if "prime" in preset else {}),
    )
    whole, broken = World(tmp_path / "whole"), World(tmp_path / "broken")
    whole.buffer.batch_of = broken.buffer.batch_of = make_repeating_batch
    whole.train(recipe)
    broken.stop_after(4)
    broken.train(recipe)
    assert broken.buffer.state == "running"
    assert broken.buffer.checkpoint == ("1-4", "runs/demo/checkpoints/1-4")
    broken.train(recipe)

    assert broken.buffer.parents == {1: "0-0", 2: "1-4"}
    assert [(n, s) for n, s, _ in broken.buffer.acks] == [(1, s) for s in range(1, 5)] + [(2, s) for s in range(5, 9)]
    expected = whole.tensors("1-8")
    assert same(expected, broken.tensors("2-8"))
    assert not same(expected, whole.tensors("0-0"))
    losses = [[ack.metrics["loss"] for _, _, ack in w.buffer.acks] for w in (whole, broken)]
    assert losses[0] == losses[1]


def test_a_resumed_lineage_announces_its_parents_weights_under_its_own_name(world: World, model: Path) -> None:
    world.stop_after(3)
    world.train(make_recipe(model, trainer={"sync_interval": 2}))
    world.train(make_recipe(model, trainer={"sync_interval": 2}))
    marks = [mark for mark in world.buffer.marks if mark != "1-2"]  # the stop may come before it is published
    assert (marks, world.versions.manifest(PolicyVersion(2, 3)).parent) == (["0-0", "2-3", "2-4"], "1-3")
    assert "eval-2-3" not in world.buffer.evals


def test_a_restart_without_a_checkpoint_begins_again_at_the_starting_model(world: World, model: Path) -> None:
    world.train_until_killed(make_recipe(model), "ack")
    assert world.buffer.state == "running"
    world.train(make_recipe(model))
    assert (world.buffer.parents, world.buffer.marks) == ({1: "0-0", 2: "0-0"}, ["0-0", "0-0", "2-4"])


@pytest.mark.parametrize("is_same_start", [False, True], ids=["its volume was replaced", "a copy of the same start"])
def test_a_redis_that_knows_less_than_the_store_is_refused(world: World, model: Path, is_same_start: bool) -> None:
    world.stop_after(3)
    world.train(make_recipe(model, trainer={"sync_interval": 2}))
    versions = world.versions.versions()
    world.buffer = RecordedBuffer()
    if is_same_start:
        world.buffer.lineage, world.buffer.step, world.buffer.parents = 1, 2, {1: "0-0"}
    lineage = world.buffer.lineage
    for _ in range(2):  # a restart changes nothing
        with pytest.raises(OlderRedisError, match="version 1-3 of run 'demo'"):
            world.train(make_recipe(model, trainer={"sync_interval": 2}))
        assert (world.buffer.lineage, world.versions.versions()) == (lineage, versions)


def test_a_run_continues_without_the_steps_whose_loss_was_accepted(world: World, model: Path) -> None:
    world.stop_after(3)
    world.train(make_recipe(model, trainer={"sync_interval": 2}))
    world.buffer.step, world.buffer.num_lost_changes = 2, 1
    world.train(make_recipe(model, trainer={"sync_interval": 2}))
    assert world.buffer.state == "done"


def test_another_model_temperature_or_dtype_is_refused(world: World, model: Path, tmp_path: Path) -> None:
    world.stop_after(1)
    world.train(make_recipe(model))
    other = make_tiny_model(tmp_path / "other", seed=1, hidden_size=32)
    for recipe, sentence in (
        (make_recipe(other), r"model\.path does not hold the model"),
        (make_recipe(model, model={"policy_temperature": 0.7}), r"temperature is 0\.7, but this run has trained"),
        (make_recipe(model, model={"dtype": "bfloat16"}), r"model\.dtype is bfloat16, but this run began with float32"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            world.train(recipe)
    assert world.buffer.lineage == 1


def test_a_stop_during_the_last_checkpoint_asks_nothing_of_a_buffer_that_ends_too(world: World, model: Path) -> None:
    def end_both(method: str) -> None:
        if method == "register_checkpoint" and world.buffer.step == 4:
            world.stop.set()
        elif method == "run" and world.stop.is_set():
            raise UnavailableError("the buffer is away")

    world.buffer.before = end_both
    world.train(make_recipe(model))
    assert (world.buffer.state, world.buffer.checkpoint) == ("running", ("1-4", "runs/demo/checkpoints/1-4"))


def test_a_stop_during_the_final_evaluation_is_resumed_and_evaluated(world: World, model: Path) -> None:
    world.buffer.eval_state = "pending"
    world.at("get_eval", world.stop.set)
    world.train(make_recipe(model))
    assert (world.buffer.state, world.buffer.checkpoint) == ("running", ("1-4", "runs/demo/checkpoints/1-4"))
    world.buffer.eval_state = "done"
    world.buffer.before = lambda method: None
    world.train(make_recipe(model))
    assert (world.buffer.state, world.buffer.marks[-1]) == ("done", "2-4")
    assert (world.buffer.evals["eval-2-4"].num_prompts, len(world.buffer.acks)) == (512, 4)
    assert same(world.tensors("1-4"), world.tensors("2-4"))


@pytest.mark.parametrize("away", ["checkpoints", "export"])
def test_a_stop_without_the_store(world: World, model: Path, monkeypatch: pytest.MonkeyPatch, away: str) -> None:
    def never(key: str, path: Path) -> None:
        if f"/{away}/" in key and world.buffer.step == 4:
            world.stop.set()
            raise StoreUnavailableError("the store is away")

    recipe = make_recipe(model, trainer={"checkpoint_interval": 3})
    with monkeypatch.context() as patch:
        at_put(patch, never)
        if away == "checkpoints":
            said = r"stopped at step 4 without a checkpoint of it \(the store is away\); a resume repeats .* after 3"
            with pytest.raises(StoreUnavailableError, match=said):
                world.train(recipe)
        else:
            world.train(recipe)
    assert world.buffer.state == "running"
    last = "1-3" if away == "checkpoints" else "1-4"
    assert world.buffer.checkpoint == (last, f"runs/demo/checkpoints/{last}")
    world.train(recipe)
    assert (world.buffer.state, world.buffer.marks[-1]) == ("done", "2-4")
    assert world.store.list("runs/demo/export/")


def test_what_a_crash_left_without_a_manifest_is_deleted_by_the_next_start(world: World, model: Path) -> None:
    world.stop_after(3)
    world.train(make_recipe(model, trainer={"checkpoint_interval": 1, "sync_interval": 1, "keep_checkpoints": 9}))
    kept = set(world.store.list("runs/demo/"))
    halves = [f"runs/demo/{kind}/1-9/model.safetensors" for kind in ("weights", "checkpoints")]
    own = [f"runs/demo/{kind}/2-9/model.safetensors" for kind in ("weights", "checkpoints")]  # as if just being written
    others = ["runs/demo/weights/0-0/extra", "runs/demo/checkpoints/notes/model.safetensors"]
    for key in (*halves, *own, *others):
        world.store.put(key, b"half")
    world.store.delete("runs/demo/weights/1-2/manifest.json")  # half deleted
    kept = {key for key in kept if "/weights/1-2/" not in key}
    world.train(make_recipe(model, trainer={"checkpoint_interval": 9, "keep_checkpoints": 9}))
    left = set(world.store.list("runs/demo/"))
    assert left >= kept | {*own, *others}
    assert not left & set(halves)
    assert not any("/weights/1-2/" in key for key in left)


def test_old_checkpoints_and_versions_are_deleted(world: World, model: Path) -> None:
    trainer = {"num_steps": 9, "sync_interval": 1, "keep_versions": 2, "checkpoint_interval": 2}
    world.train(make_recipe(model, trainer=trainer))
    checkpoints = {key.split("/")[3] for key in world.store.list("runs/demo/checkpoints/")}
    assert checkpoints == {"1-8", "1-9", "objects"}
    named = {key for v in ("1-8", "1-9") for key in object_keys(world.store, f"runs/demo/checkpoints/{v}")}
    assert set(world.store.list("runs/demo/checkpoints/objects/")) == named
    kept = [str(v) for v in world.versions.versions()]
    assert (kept[0], kept[-2:]) == ("0-0", ["1-8", "1-9"])
    assert len(kept) < 9


def test_a_failed_checkpoint_is_tried_at_a_sync(world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses the checkpoint of step 6. Step 7 does not repeat it, the sync at step 8 does."""
    tried = []

    def sometimes(key: str, path: Path) -> None:
        if "/checkpoints/" in key and path.name == "model-00001.safetensors":
            tried.append(world.buffer.step)
            if world.buffer.step < 8:
                raise StoreUnavailableError("the store is away")

    at_put(monkeypatch, sometimes)
    world.train(make_recipe(model, trainer={"num_steps": 11, "sync_interval": 4, "checkpoint_interval": 6}))
    assert tried == [6, 8, 11]


def test_a_start_waits_for_store_and_buffer(world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, run, late = world.store.check, world.buffer.run, ["store", "store", "buffer", "buffer", "nothing"]
    recipe = make_recipe(model, trainer={"num_steps": 1, "sync_interval": 1})

    def check_late(*, write: bool = False) -> None:
        if late[0] == "store":
            late.pop(0)
            raise StoreUnavailableError("no answer") from EndpointConnectionError(endpoint_url="http://store")
        check(write=write)

    def run_late() -> RunInfo:
        if late[0] == "buffer":
            late.pop(0)
            raise UnavailableError("does not answer")
        return run()

    monkeypatch.setattr(world.store, "check", check_late)
    monkeypatch.setattr(world.buffer, "run", run_late)
    world.train(recipe)
    assert (world.buffer.state, late) == ("done", ["nothing"])
    # and not for ever
    monkeypatch.setattr("tba_trainer.trainer.START_WAIT_S", 0.0)
    late.insert(0, "buffer")
    with pytest.raises(WaitTimeoutError, match=r"wait 'buffer-start': .*does not answer"):
        world.train(recipe)
    refused = StoreUnavailableError("access denied")  # waiting cannot help
    monkeypatch.setattr(world.store, "check", lambda **_: (_ for _ in ()).throw(refused))
    with pytest.raises(StoreUnavailableError, match="access denied"):
        world.train(recipe)


def test_training_continues_without_the_store(world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is away from the first version on until step 6 is done; then everything is published in order."""
    refuse_puts(monkeypatch, lambda key: "/weights/1-" in key and world.buffer.step < 6)
    world.train(make_recipe(model, trainer={"num_steps": 6, "sync_interval": 2, "checkpoint_interval": 100}))
    assert (world.buffer.marks, world.buffer.state) == (["0-0", "1-2", "1-4", "1-6"], "done")


def test_training_waits_by_name_when_too_many_versions_are_unpublished_and_then_says_why(
    world: World, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_puts(monkeypatch, lambda key: "/weights/1-" in key)
    monkeypatch.setattr("tba_trainer.loop.status.HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(limits, "MAX_UNPUBLISHED_VERSIONS", 2)
    monkeypatch.setattr(limits, "RETRY_S", 3.0)
    trainer = {"num_steps": 50, "sync_interval": 1}
    with pytest.raises(WaitTimeoutError, match=r"2 weight versions .* within 3 s \(the store is away\)"):
        world.train(make_recipe(model, trainer=trainer))
    assert world.buffer.step == 3  # versions 1 and 2 wait, the third has no place
    assert world.buffer.state == "running"
    assert "unpublished-versions" in world.waits()


def test_a_version_is_announced_again_and_never_before_it_exists(world: World, model: Path) -> None:
    fail = failing(2, lambda: UnavailableError("the buffer is away"), "announce_version")

    def before(method: str) -> None:
        if method == "announce_version":
            assert len(world.versions.versions()) == len(world.buffer.marks) + 1
        fail(method)

    world.buffer.before = before
    world.train(make_recipe(model, trainer={"sync_interval": 2}))
    assert world.buffer.marks == ["0-0", "1-2", "1-4"]


def test_a_fenced_trainer_stops_and_writes_nothing_more(world: World, model: Path) -> None:
    world.at("ack", lambda: setattr(world.buffer, "lineage", 2), step=2)  # a newer trainer has started
    with pytest.raises(FencedError):
        world.train(make_recipe(model, trainer={"num_steps": 9, "sync_interval": 1, "checkpoint_interval": 9}))
    assert (world.buffer.step, world.buffer.state, world.store.list("runs/demo/checkpoints/")) == (2, "running", [])
    assert world.store.list("runs/demo/export/") == []


def test_a_publisher_that_is_fenced_ends_the_training(world: World, model: Path) -> None:
    def before(method: str) -> None:
        if method == "announce_version" and world.buffer.step >= 1:
            raise FencedError("a newer lineage owns the run")
        if method == "ack":
            time.sleep(0.05)

    world.buffer.before = before
    with pytest.raises(FencedError):
        world.train(make_recipe(model, trainer={"num_steps": 400, "sync_interval": 1}))
    assert world.buffer.marks == ["0-0"]


def test_a_batch_that_expired_touches_no_weight_and_is_drawn_again_for_the_same_step(
    tmp_path: Path, model: Path
) -> None:
    smooth, bumpy = World(tmp_path / "smooth"), World(tmp_path / "bumpy")
    bumpy.buffer.before = failing(2, lambda: VoidBatchError("batch batch-1 is void"), "ack")
    for world in (smooth, bumpy):
        world.train(make_recipe(model))
        assert [step for _, step, _ in world.buffer.acks] == [1, 2, 3, 4]
    assert [step for _, step in bumpy.buffer.drawn].count(1) == 3
    assert same(smooth.tensors("1-4"), bumpy.tensors("1-4"))


def test_batches_that_always_expire_end_with_the_setting_to_change(world: World, model: Path) -> None:
    world.buffer.before = failing(99, lambda: VoidBatchError("batch is void"), "ack")
    with pytest.raises(TbaError, match=r"5 batches in a row were void before step 1 .* raise buffer\.batch_deadline_s"):
        world.train(make_recipe(model))
    assert world.buffer.acks == []


def test_an_ack_that_is_refused_for_another_reason_ends_the_trainer(world: World, model: Path) -> None:
    """A ledger that lost its last lines: no batch deadline helps there."""
    refused = ConflictError("step 3 cannot be acked: the last acked step of lineage 1 is 1")
    world.at("ack", raising(refused), step=2)
    with pytest.raises(TbaError, match=r"disagree about step 3: .* start the trainer again") as caught:
        world.train(make_recipe(model, trainer={"checkpoint_interval": 1}))
    assert "batch_deadline_s" not in str(caught.value)
    assert world.buffer.drawn.count((1, 3)) == 1
    world.buffer.before = lambda method: None
    world.train(make_recipe(model))
    assert [(lineage, step) for lineage, step, _ in world.buffer.acks] == [(1, 1), (1, 2), (2, 3), (2, 4)]


def test_no_batch_ends_with_the_name_of_the_wait(world: World, model: Path) -> None:
    world.at("draw_batch", raising(BusyError("too few rollouts", retry_after_s=0.05, wait="rollouts")))
    with pytest.raises(WaitTimeoutError, match=r"no batch for step 1 within 1 s: the wait is 'rollouts'"):
        world.train(make_recipe(model, trainer={"batch_wait_s": 1.0}))


def test_a_paused_run_does_not_use_up_the_wait_for_a_batch(world: World, model: Path) -> None:
    begin_s: list[float] = []

    def be_paused() -> None:
        begin_s.append(time.monotonic())
        paused_s = begin_s[-1] - begin_s[0]
        # also until a heartbeat has told it
        if paused_s < 2.0 or ("run-paused" not in world.waits() and paused_s < 60.0):
            raise BusyError("paused", retry_after_s=0.05, wait="run-paused")

    world.at("draw_batch", be_paused)
    world.train(make_recipe(model, trainer={"batch_wait_s": 1.5}))
    assert world.buffer.state == "done"
    assert "run-paused" in world.waits()


def test_a_stopping_run_is_published_checkpointed_exported_and_done(world: World, model: Path) -> None:
    world.at("ack", lambda: setattr(world.buffer, "state", "stopping"), step=2)
    world.train(make_recipe(model, trainer={"num_steps": 50, "sync_interval": 10}))
    last = f"1-{world.buffer.step}"
    assert world.buffer.step in (3, 4)  # the batch drawn ahead is still used
    assert (world.buffer.marks, world.buffer.checkpoint) == (["0-0", last], (last, f"runs/demo/checkpoints/{last}"))
    assert world.store.list("runs/demo/export/")
    assert world.buffer.state == "done"
    assert f"trained to version {last}, step {world.buffer.step} of 50: " in str(world.buffer.reason)


def test_a_run_that_the_buffer_has_failed_stays_failed(world: World, model: Path) -> None:
    world.at("ack", lambda: setattr(world.buffer, "state", "failed"), step=2)
    with pytest.raises(RunFailedError, match="the run has failed"):
        world.train(make_recipe(model, trainer={"num_steps": 50, "sync_interval": 10}))
    assert (world.buffer.state, world.store.list("runs/demo/export/")) == ("failed", [])


def test_max_train_s_ends_the_run_early(world: World, model: Path) -> None:
    world.train(make_recipe(model, trainer={"num_steps": 100_000, "max_train_s": 0.5}))
    assert world.buffer.state == "done"
    assert world.buffer.step < 100_000
    assert f"step {world.buffer.step} of 100000: trainer.max_train_s (0.5 s) is over" in str(world.buffer.reason)


def test_a_run_that_is_over_is_not_trained_again(world: World, model: Path) -> None:
    world.buffer.state = "done"
    with pytest.raises(ConflictError, match="run 'demo' is done"):
        world.train(make_recipe(model))
    assert world.buffer.lineage == 0


def test_heartbeats_and_acks_show_how_long_was_waited_in_all(world: World, model: Path) -> None:
    refuse = failing(2, lambda: VoidBatchError("batch is void"), "ack")

    def before(method: str) -> None:
        if method == "draw_batch":
            time.sleep(0.15)
        refuse(method)

    world.buffer.before = before
    world.train(make_recipe(model, trainer={"num_steps": 10, "prefetch_batches": 0}))
    acked = [ack.metrics for _, _, ack in world.buffer.acks]
    waited_s = [metrics["waited_s_total"] or 0.0 for metrics in acked]
    assert waited_s == sorted(waited_s)
    assert waited_s[-1] > sum(metrics["wait_s"] or 0.0 for metrics in acked) + 0.2  # two more draws
    assert waited_s[-1] - waited_s[3] < (acked[-1]["train_s"] or 0.0) - (acked[3]["train_s"] or 0.0)
    last, gauges = world.buffer.beats[-1], {"step": 10, "waited_s_total": waited_s[-1], "num_unpublished_versions": 0}
    assert (last.kind, last.state, last.version) == ("trainer", "done", PolicyVersion(1, 10))
    assert last.gauges.items() >= gauges.items()


def remove_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (shutil.rmtree, r"holds no model \(no config\.json\)"),
        (remove_tokenizer, "holds no tokenizer"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10"), "cannot be loaded: "),
    ],
)
def test_a_bad_model_is_a_sentence(world: World, tmp_path: Path, harm: Callable[[Path], object], sentence: str) -> None:
    folder = make_tiny_model(tmp_path / "harmed", hidden_size=32)
    harm(folder)
    with pytest.raises(ConfigError, match=rf"model\.path .*harmed.* {sentence}"):
        world.train(make_recipe(folder))
    assert world.buffer.lineage == 0


def test_an_unusable_device_is_one_sentence(world: World, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device 'nonsense' cannot be used"):
        world.train(make_recipe(model, trainer={"device": "nonsense"}))
