"""An operator's rollback over HTTP: what it can return to, how it waits, what it forbids meanwhile, how it ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tba_buffer.run import rollback

from tba.api import (
    AckRequest,
    CheckpointRequest,
    LineageReply,
    LineageRequest,
    RollbackRequest,
    RunCommand,
    VersionRequest,
)
from tba.clients import BufferClient
from tba.errors import BusyError, ConflictError, FencedError, RollbackError
from tba.store import FileStore, ObjectStore
from tba.versions import PolicyVersion
from tba.weights import checkpoint_prefix
from tba_cli.main import main
from tests.support.buffer import begin_run
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.leases import draw, make_step
from tests.support.waits import until

MANIFEST = b"{}"


def write_checkpoints(folder: Path, *versions: str) -> None:
    store = FileStore(folder)
    for version in versions:
        store.put(f"{checkpoint_prefix('test')}{version}/manifest.json", MANIFEST)


def serve(serve_buffer: ServeBuffer, folder: Path) -> BufferThread:
    return serve_buffer(store={"url": f"file://{folder}"})


def train(client: BufferClient, lineage: LineageReply, steps: range) -> None:
    for step in steps:
        make_step(client, lineage, step)


def test_a_request_waits_forbids_further_steps_and_ends_with_the_lineage_that_obeys_it(
    serve_buffer: ServeBuffer, tmp_path: Path
) -> None:
    served = serve(serve_buffer, tmp_path)
    client, lineage = served.begin(8, per_prompt=6)
    with pytest.raises(ConflictError, match=r"step 9; there is none so far \(trainer.checkpoint_interval"):
        client.rollback(RollbackRequest(step=9))
    train(client, lineage, range(1, 5))
    write_checkpoints(tmp_path, "1-2", "1-4", "7-1", "backup")  # a person has copied one
    FileStore(tmp_path).put(f"{checkpoint_prefix('test')}1-3/state.json", b"half written")
    client.register_checkpoint(CheckpointRequest(version="1-4", token=lineage.token, key="checkpoints/1-4"))
    assert client.checkpoints() == ["1-4", "1-2"]  # 7-1 is of no lineage that this one descends from
    with pytest.raises(ConflictError, match="is at or before step 1; there are 1-4, 1-2 "):
        client.rollback(RollbackRequest(step=1))
    batch = draw(client, lineage, 5).batch_id

    request = RollbackRequest(step=3, reason="the reward fell")
    waiting = client.rollback(request).rollback
    assert waiting is not None
    assert (waiting.version, waiting.step, waiting.reason) == ("1-2", 3, "the reward fell")
    other = RollbackRequest(step=2)
    for again in (request, other):  # the same request, and another one for the same checkpoint
        assert client.rollback(again).rollback == waiting
    with pytest.raises(ConflictError, match="a rollback to 1-2 waits for the trainer already"):
        client.rollback(RollbackRequest(step=4))
    said = "was refused: an operator has asked for a rollback to 1-2"
    with pytest.raises(RollbackError, match=f"the ack of step 5 {said}"):
        client.ack(batch, AckRequest(lineage=1, step=5, token=lineage.token))
    with pytest.raises(RollbackError, match=f"the draw for step 6 {said}"):
        draw(client, lineage, 6)
    with pytest.raises(RollbackError, match=f"the checkpoint of version 1-4 {said}"):
        client.register_checkpoint(CheckpointRequest(version="1-4", token=lineage.token, key="checkpoints/1-4"))
    with pytest.raises(RollbackError, match=f"the command 'done' {said}"):
        client.command("done", RunCommand(token=lineage.token))

    served.stop()  # nothing of it lives in the process
    client = serve(serve_buffer, tmp_path).client()
    assert client.run().rollback == waiting
    with pytest.raises(ConflictError, match="the rollback that it obeys does not wait any more; read the run again"):
        client.new_lineage(LineageRequest(trainer_id="t", parent="1-2", obeys="another request"))
    assert (client.run().rollback, client.run().lineage) == (waiting, 1)
    client.new_lineage(LineageRequest(trainer_id="t", parent="1-4"))  # it read the run before the request came
    assert client.run().rollback == waiting
    back = LineageRequest(
        trainer_id="t", parent="1-2", checkpoint_key="checkpoints/1-2", obeys=waiting.request_id, in_process=True
    )
    reply = client.new_lineage(back)
    assert client.new_lineage(back) == reply  # a late repeat
    info = client.run()
    assert (info.rollback, info.state, info.num_rollbacks, info.checkpoint) == (None, "running", 0, "1-2")
    assert client.rollback(request).rollback is None  # the reply was lost, and it is done
    with pytest.raises(FencedError):
        draw(client, lineage, 5)
    train(client, reply, range(3, 4))
    assert [(line.command, line.lineage, line.step, line.rollback) for line in client.run_changes().changes] == [
        ("rollback", 1, 4, "1-2"),
        ("lineage", 3, 2, "1-2"),
    ]
    assert client.rollback(RollbackRequest(step=2)).rollback is not None
    client.new_lineage(LineageRequest(trainer_id="t", parent="1-1", rollback=True))
    done = client.run_changes().changes[-1]
    said = "an alarm, or a start of the trainer, went back further"
    assert (done.command, done.rollback, done.reason) == ("lineage", "1-2", said)
    for late in (request, other):
        assert client.rollback(late).rollback is None


def test_what_the_trainer_deletes_meanwhile_is_not_asked_for(
    serve_buffer: ServeBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, lineage = serve(serve_buffer, tmp_path).begin(8, per_prompt=6)
    train(client, lineage, range(1, 4))
    write_checkpoints(tmp_path, "1-1", "1-2", "1-3")
    listed = rollback.complete_versions

    def then_registered(store: ObjectStore, prefix: str) -> list[PolicyVersion]:
        found = listed(store, prefix)  # the trainer registers 1-3, and has not deleted 1-1 yet
        kept = CheckpointRequest(version="1-3", token=lineage.token, key="k", kept=["1-2", "1-3"])
        client.register_checkpoint(kept)
        return found

    monkeypatch.setattr(rollback, "complete_versions", then_registered)
    with pytest.raises(ConflictError, match=r"at or before step 1; there are 1-3, 1-2 \("):
        client.rollback(RollbackRequest(step=1))
    assert client.checkpoints() == ["1-3", "1-2"]


def test_a_paused_run_rolls_back_staying_paused_and_a_stop_withdraws(serve_buffer: ServeBuffer, tmp_path: Path) -> None:
    client, lineage = serve(serve_buffer, tmp_path).begin(8, per_prompt=6)
    train(client, lineage, range(1, 3))
    write_checkpoints(tmp_path, "1-1", "1-2")
    client.command("pause", RunCommand())
    problems: list[Exception] = []

    def wait_for_batch() -> None:
        try:
            draw(client, lineage, 3, wait_s=60.0)
        except ConflictError as error:
            problems.append(error)

    trainer = threading.Thread(target=wait_for_batch)
    trainer.start()
    until("the draw is held", lambda: any(wait.name == "run-paused" for wait in client.run().waits))
    waiting = client.rollback(RollbackRequest(step=2)).rollback
    trainer.join(timeout=30.0)  # told at once, long before its wait ends
    assert [type(error) for error in problems] == [RollbackError]
    assert waiting is not None
    # gone or damaged: the trainer took an older one
    second = client.new_lineage(LineageRequest(trainer_id="t", parent="1-1", obeys=waiting.request_id))
    client.announce_version(VersionRequest(version="2-1", token=second.token))
    assert client.run().state == "paused"
    with pytest.raises(BusyError, match="paused"):
        draw(client, second, 2)
    done = client.run_changes().changes[-1]
    assert (done.command, done.old, done.new, done.rollback) == ("lineage", "paused", "paused", "1-2")
    assert done.reason == "the checkpoint that was asked for is gone or damaged"
    last = client.run().last_change
    assert last is not None
    assert last.command == "pause"  # the change that brought the run into this state

    client.rollback(RollbackRequest(step=1))
    assert client.command("stop", RunCommand(reason="enough")).rollback is None
    withdrawn = client.run_changes().changes[-1]
    assert (withdrawn.command, withdrawn.rollback) == ("stop", "1-1")
    with pytest.raises(ConflictError, match="while the run is stopping; it is possible while it is running or paused"):
        client.rollback(RollbackRequest(step=1))
    client.new_lineage(LineageRequest(trainer_id="t", parent="1-1", in_process=True))
    assert client.run().state == "stopping"  # the process goes on to end the run
    client.new_lineage(LineageRequest(trainer_id="t", parent="1-1"))
    assert client.run().state == "running"

    asked = client.rollback(RollbackRequest(step=1)).rollback
    assert asked is not None
    lost = LineageRequest(trainer_id="t", parent="1-1", obeys=asked.request_id, fails='it is "lost"', in_process=True)
    assert client.new_lineage(lost) == client.new_lineage(lost)
    info, failed = client.run(), client.run_changes().changes[-1]
    assert (info.state, info.state_reason, info.rollback) == ("failed", 'it is "lost"', None)
    assert info.last_change == failed
    assert (failed.command, failed.old, failed.new, failed.reason) == ("fail", "running", "failed", 'it is "lost"')
    client.new_lineage(LineageRequest(trainer_id="t", parent="1-1", in_process=True))
    assert client.run().state == "failed"


def test_the_command_asks_shows_and_explains(
    serve_buffer: ServeBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(serve_buffer, tmp_path)
    client = served.client()
    train(client, begin_run(client, 8, per_prompt=6), range(1, 3))
    write_checkpoints(tmp_path, "1-1", "1-2")

    def said(*words: str) -> tuple[int, str]:
        code = main([*words, "--url", served.url])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    assert "checkpoints, newest first: 1-2, 1-1\n" in said("rollback")[1]
    code, text = said("rollback", "--step", "1", "--reason", "look")
    assert code == 0
    assert "a rollback to 1-1 waits for the trainer (look)\n" in text
    assert "  a rollback to 1-1 waits for the trainer (look)\n" in said("status")[1]
    code, text = said("rollback", "--step", "0")
    assert code == 2
    assert "at or before step 0; there are 1-2, 1-1" in text
    for step in (-1, 10**12):
        assert said("rollback", "--step", str(step)) == (
            2,
            f"error: step {step} is out of range; name one from 0 to 999999999999\n",
        )
    code, text = said("rollback", "--reason", "look")
    assert (code, "--reason says why the run returns to --step N" in text) == (2, True)
