"""Parts of the training loop: publishing, signals, heartbeats, the end of the process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tba_trainer.checkpoints import weight_files
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.loop import status as status_module
from tba_trainer.loop.batches import Prefetcher
from tba_trainer.loop.evaluations import Evaluations
from tba_trainer.loop.publisher import Publisher
from tba_trainer.loop.shutdown import stop_on_signals
from tba_trainer.loop.status import HUNG_AFTER_S, Heartbeats, Status
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import load_policy, side_files
from transformers import AutoModelForCausalLM

from tba.clients import BufferClient
from tba.config.evaluation import EvalSection
from tba.errors import RunOverError
from tba.versions import START, PolicyVersion
from tba.wire import STARTED_AT_S, WAITED_S, Batch, decode_heartbeat, encode_heartbeat
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import RecordedBuffer, make_batch, make_recipe
from tests.support.waits import until


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_canary_is_what_the_published_tensors_give_in_the_published_dtype(tmp_path: Path, dtype: str) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=32, tied=True)
    recipe = make_recipe(folder, model={"dtype": dtype, "policy_temperature": 0.5})
    theta = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    snapshots = WeightSnapshotWriter(theta, recipe, folder=tmp_path)
    with torch.no_grad():
        for parameter in theta.parameters():
            parameter += 0.01
    taken = snapshots.take(PolicyVersion(1, 4), START)
    assert "lm_head.weight" not in taken.tensors  # tied: named once
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    loaded.load_state_dict(dict(taken.tensors), strict=False)
    sequences = pack_sequences([np.array(taken.canary.prompt_tokens)], [np.array(taken.canary.response_tokens)], "cpu")
    with torch.no_grad():
        expected = LogprobModel(loaded, temperature=1.0).token_logprobs(sequences)
        trained = LogprobModel(theta, temperature=1.0).token_logprobs(sequences)
    found = torch.tensor(taken.canary.logprobs)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert torch.allclose(found, trained, atol=1e-6) == (dtype == "float32")


def test_a_snapshot_is_kept_and_whole_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(make_tiny_model(tmp_path / "model", hidden_size=32))
    monkeypatch.setattr(weight_files, "FILE_BYTES", 20_000)
    theta = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    before = {name: parameter.detach().clone() for name, parameter in theta.named_parameters()}
    taken = WeightSnapshotWriter(theta, recipe, folder=tmp_path).take(START, None)
    with torch.no_grad():
        for parameter in theta.parameters():
            parameter.zero_()
    save, saved = weight_files.save_file, list[Any]()

    def save_one(*args: Any) -> None:
        saved.append(args)
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        save(*args)

    monkeypatch.setattr(weight_files, "save_file", save_one)
    with pytest.raises(OSError, match="no space"):
        taken.write()
    taken.write()
    assert len(saved) > 4
    assert not taken.held
    assert taken.tensors.keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in taken.tensors.items())


def test_no_more_than_one_snapshot_is_in_memory_and_a_closed_publisher_holds_none_for_later(tmp_path: Path) -> None:
    recipe = make_recipe(make_tiny_model(tmp_path / "model", hidden_size=32))
    theta = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    snapshots = WeightSnapshotWriter(theta, recipe, folder=tmp_path / "snapshots")
    (tmp_path / "snapshots").mkdir()
    others: Any = dict.fromkeys(("buffer", "versions", "checkpoints", "evaluations", "status", "start"))
    session: Any = SimpleNamespace(token="t", parent=START)
    # its thread is not started: as while a transfer takes for ever
    publisher = Publisher(section=recipe.trainer, session=session, files={}, stop=threading.Event(), **others)
    for step in (1, 2, 3):
        publisher.publish(snapshots, PolicyVersion(1, step))
    folders = sorted((tmp_path / "snapshots").iterdir())
    assert [any(folder.iterdir()) for folder in folders] == [True, True, False]
    publisher.close()
    assert [folder.exists() for folder in folders] == [True, False, False]
    assert publisher.gauges()["num_unpublished_versions"] == 1


def test_only_config_and_tokenizer_files_are_published(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "modeling_custom.py").write_text("")
    names = set(side_files(folder, trust_remote_code=False))
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not names & {"pytorch_model.bin", "model.safetensors", "model.safetensors.index.json", "modeling_custom.py"}
    # names alone: nothing is loaded, and the file is empty
    assert "modeling_custom.py" in side_files(folder, trust_remote_code=True)


@pytest.mark.parametrize(
    ("start_step", "due_at"), [(49, [52, 100]), (50, [52, 100]), (51, [52, 100]), (52, [100]), (54, [100])]
)
def test_an_evaluation_that_a_stop_cut_off_is_due_at_the_next_version(start_step: int, due_at: list[int]) -> None:
    section = EvalSection(every_steps=50, num_prompts=7)
    evaluations = Evaluations(RecordedBuffer(), section, token="t", start_step=start_step, sync_interval=4)  # pyright: ignore[reportArgumentType]
    syncs = [step for step in range(start_step + 1, 101) if step % 4 == 0]
    assert [step for step in syncs if evaluations.num_prompts_due(step, every_steps=50)] == due_at


def prefetcher_of(draw: Callable[[int, float], Batch], **limits: Any) -> Prefetcher:
    status, stop = Status(trainer_id="trainer", run="demo"), threading.Event()
    return Prefetcher(draw, status=status, first_step=1, last_step=5, batch_wait_s=5.0, stop=stop, **limits)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_are_drawn_as_far_ahead_as_allowed_and_no_further(ahead: int) -> None:
    drawn: list[int] = []

    def draw(step: int, wait_s: float) -> Batch:
        drawn.append(step)
        return make_batch(step)

    prefetcher = prefetcher_of(draw, ahead=ahead, batch_deadline_s=60.0)
    prefetcher.start()
    for step in range(1, 6):
        batch = prefetcher.take(step)
        assert batch is not None
        assert batch.seed == step
        allowed = list(range(1, min(step + ahead, 5) + 1))
        until("everything that may be drawn while the step runs is", lambda allowed=allowed: len(drawn) >= len(allowed))
        assert drawn == allowed
    prefetcher.close()


def test_a_batch_that_has_outlived_its_deadline_is_drawn_again() -> None:
    drawn: list[int] = []

    def draw(step: int, wait_s: float) -> Batch:
        drawn.append(step)
        if len(drawn) > 4:
            raise RunOverError("enough")
        return make_batch(step)

    prefetcher = prefetcher_of(draw, ahead=0, batch_deadline_s=0.0)
    prefetcher.start()
    with pytest.raises(RunOverError):
        prefetcher.take(1)
    assert drawn == [1] * 5
    prefetcher.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_locked", [False, True])
def test_a_signal_sets_the_event_and_the_old_handler_comes_back(number: signal.Signals, is_locked: bool) -> None:
    before = signal.getsignal(number)
    stop = threading.Event()
    with stop_on_signals(stop):
        assert not stop.is_set()
        with stop._cond if is_locked else nullcontext():  # type: ignore[attr-defined]  # Event.set needs it
            os.kill(os.getpid(), number)
            for _ in range(1000):  # so that the handler runs here, where one that sets the event would hang
                pass
        assert stop.wait(30)
    assert signal.getsignal(number) is before


def test_a_trainer_shows_that_it_is_alive_until_its_loop_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the liveness probe of the chart looks at; a stopped process touches nothing either."""
    monkeypatch.setattr(status_module, "HEARTBEAT_INTERVAL_S", 0.02)
    now_s = 0.0
    status = Status(trainer_id="trainer-1", run="demo", now=lambda: now_s)
    alive, buffer = tmp_path / "alive", RecordedBuffer()
    heartbeats = Heartbeats(cast(BufferClient, buffer), status, dict, alive)

    def is_touched() -> bool:
        os.utime(alive, (0, 0))
        num = len(buffer.beats)
        until("beats", lambda: len(buffer.beats) >= num + 2)
        return alive.stat().st_mtime > 0

    heartbeats.start()
    until("the first beat", alive.exists)
    status.set_step(PolicyVersion(1, 1), {})
    now_s += HUNG_AFTER_S
    assert is_touched()
    now_s += 1
    assert not is_touched(), "a step lasts forever"
    with status.named_wait("rollouts", 100.0):
        now_s += 100 + HUNG_AFTER_S
        assert is_touched()
        now_s += 1
        assert not is_touched(), "a wait goes on beyond its deadline"
    assert is_touched(), "it has ended after all"
    heartbeats.close()
    assert not alive.exists(), "the next lineage of this process takes its time to start"


def test_heartbeats_say_how_long_the_trainer_has_waited_by_name_the_open_wait_too() -> None:
    now = 100.0
    status = Status(trainer_id="t", run="demo", now=lambda: now)

    def waited() -> dict[str, float]:
        gauges = decode_heartbeat(encode_heartbeat(status.beat({"extra": 1.0}))).gauges
        assert gauges["extra"] == 1.0
        assert gauges[STARTED_AT_S] > 1.6e9
        return {name.removeprefix(WAITED_S): value for name, value in gauges.items() if name.startswith(WAITED_S)}

    assert waited() == {}
    with status.named_wait("batch", 60.0):
        now += 2.0
        assert waited() == {"batch": 2.0}
        status.begin_wait("samples-per-insert", 60.0)
        now += 3.5
        assert waited() == {"batch": 2.0, "samples-per-insert": 3.5}
    now += 10.0  # at work
    with status.named_wait("batch", 60.0):
        now += 0.25
    assert (waited(), status.waited_s, status.beat({}).wait) == ({"batch": 2.25, "samples-per-insert": 3.5}, 5.75, None)


PROGRAM = """
import atexit, os
atexit.register(os.abort)  # as a thread of gloo that wakes too late
print("said before the end", end="")
from tba_trainer.distributed.launch import exit_process
exit_process(3)
"""


@pytest.mark.parametrize(("world_size", "code"), [("2", 3), ("1", -6)])
def test_in_a_team_no_teardown_follows(world_size: str, code: int) -> None:
    environ = {**os.environ, "WORLD_SIZE": world_size}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "said before the end" if world_size == "2" else done.stdout)
