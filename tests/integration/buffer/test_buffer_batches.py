"""Batches over HTTP: drawing, waiting, acking, fencing, and the ledger that comes of it."""

from __future__ import annotations

import threading
import time

import pytest
from redis import Redis

from tba.api import (
    AckRequest,
    CheckpointRequest,
    LeaseRequest,
    LedgerEntry,
    LineageReply,
    LineageRequest,
    ResumeEntry,
    RunCommand,
    VersionRequest,
)
from tba.clients import BufferClient
from tba.errors import BadRequestError, ConflictError, FencedError, RunOverError, VoidBatchError
from tba.versions import START, PolicyVersion
from tba.wire import Batch, encode_rollout
from tba_cli.reports.ledger import LedgerCheck, batch_entries, ledger_lines, lineage_tree
from tests.support.buffer import make_payloads, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer, later
from tests.support.leases import draw, wait_of
from tests.support.waits import DEADLINE_S, until


def filled(serve_buffer: ServeBuffer, **sections: dict) -> tuple[BufferClient, LineageReply]:
    return serve_buffer(**sections).begin(8, per_prompt=6)


def acked(client: BufferClient) -> list[LedgerEntry]:
    return batch_entries(client.ledger().entries)


def ack(client: BufferClient, lineage: LineageReply, step: int, batch: Batch, ages: list[int] | None = None) -> None:
    metrics = {"loss": 0.5 * step, "missing": None}
    who = {"lineage": lineage.lineage, "step": step, "token": lineage.token}
    client.ack(batch.batch_id, AckRequest(**who, metrics=metrics, policy_ages=ages or []))


def test_a_batch_has_k_rollouts_of_one_prompt_per_slot(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer)
    batch = draw(client, lineage, 1)
    assert len(batch.groups) == len({group.prompt_id for group in batch.groups}) == 4
    for group in batch.groups:
        assert {rollout.prompt_id for rollout in group.rollouts} == {group.prompt_id}
        assert len({rollout.rollout_id for rollout in group.rollouts}) == 4
    assert batch.log_position == client.stats().log_position - 1  # of the draw itself
    assert batch.deadline_s > time.time()


def test_a_group_may_be_one_rollout_for_reinforce(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, sampling={"group_size": 1}, objective={"preset": "reinforce"})
    assert [len(group.rollouts) for group in draw(client, lineage, 1).groups] == [1, 1, 1, 1]


def test_an_acked_batch_is_one_line_of_the_ledger_however_often_it_is_acked(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer)
    batches = []
    for step in (1, 2, 3):
        batches.append(draw(client, lineage, step))
        for _ in range(2):
            ack(client, lineage, step, batches[-1], ages=[step - 1] * 16)
    reply = client.ledger()
    first, *entries = reply.entries
    assert isinstance(first, ResumeEntry)
    assert (first.lineage, first.parent, first.trainer_id) == (1, "0-0", "trainer-test")
    assert [(entry.step, entry.batch_id) for entry in batch_entries(entries)] == [
        (step, batch.batch_id) for step, batch in zip((1, 2, 3), batches, strict=True)
    ]
    assert reply.next is None
    second = entries[1]
    assert isinstance(second, LedgerEntry)
    assert second.rollout_ids == [rollout.rollout_id.hex() for rollout in batches[1].rollouts]
    assert (second.seed, second.log_position) == (batches[1].seed, batches[1].log_position)
    assert (second.slots["total"], second.slots["rollouts"], second.slots["distinct_rollouts"]) == (4, 16, 16)
    assert second.slots["recent"] + second.slots["replay"] == 4
    assert second.metrics == {"loss": 1.0, "missing": None}
    stats = client.stats()
    assert (stats.rollouts_drawn, stats.rollouts_trained) == (48, 48)
    assert stats.policy_age_histogram == {0: 16, 1: 16, 2: 16}
    assert client.run().step == 3
    page = client.ledger(after=2, limit=1)
    assert ([entry.step for entry in batch_entries(page.entries)], page.next) == ([2], 3)


def test_a_repeated_draw_for_one_step_answers_the_same_batch(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer)
    first, again, ahead = draw(client, lineage, 1), draw(client, lineage, 1), draw(client, lineage, 2)
    assert first.batch_id == again.batch_id
    assert [r.rollout_id for r in first.rollouts] == [r.rollout_id for r in again.rollouts]
    assert ahead.batch_id != first.batch_id
    assert client.stats().rollouts_drawn == 32
    ack(client, lineage, 1, first)
    with pytest.raises(ConflictError, match="has acked its steps up to 1"):
        draw(client, lineage, 1)
    assert client.stats().rollouts_drawn == 32


def test_a_batch_whose_deadline_is_near_is_not_answered_again(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, buffer={"batch_deadline_s": 1000.0})
    batch = draw(client, lineage, 1)
    later(client, 450.0)
    assert draw(client, lineage, 1).batch_id == batch.batch_id
    later(client, 100.0)
    new = draw(client, lineage, 1)
    assert new.batch_id != batch.batch_id
    with pytest.raises(VoidBatchError):
        ack(client, lineage, 1, batch)
    ack(client, lineage, 1, new)
    assert client.stats().rollouts_trained == 16


def test_redis_may_forget_its_scripts(serve_buffer: ServeBuffer, raw: Redis) -> None:
    client, lineage = filled(serve_buffer)
    batch = draw(client, lineage, 1)
    raw.script_flush()
    assert draw(client, lineage, 2).batch_id != batch.batch_id


def test_an_expired_batch_is_void_and_the_step_draws_again(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, buffer={"batch_deadline_s": 1000.0})
    batch = draw(client, lineage, 1)
    later(client, 1001.0)
    with pytest.raises(VoidBatchError, match="deadline"):
        ack(client, lineage, 1, batch)
    new = draw(client, lineage, 1)
    assert new.batch_id != batch.batch_id
    ack(client, lineage, 1, new)
    assert [entry.batch_id for entry in acked(client)] == [new.batch_id]


def test_an_ack_that_does_not_fit_its_batch_is_refused(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer)
    batch, ahead = draw(client, lineage, 1), draw(client, lineage, 2)
    with pytest.raises(VoidBatchError, match="unknown"):
        client.ack("batch-of-nobody", AckRequest(lineage=1, step=1, token=lineage.token))
    with pytest.raises(VoidBatchError, match="another step"):
        ack(client, lineage, 2, batch)
    with pytest.raises(ConflictError, match="in order") as caught:
        ack(client, lineage, 2, ahead)
    assert not isinstance(caught.value, VoidBatchError)
    with pytest.raises(BadRequestError, match="16 rollouts"):
        ack(client, lineage, 1, batch, ages=[0])
    ack(client, lineage, 1, batch)
    with pytest.raises(ConflictError, match="has acked batch"):
        ack(client, lineage, 1, ahead)
    assert len(acked(client)) == 1


def test_everything_of_a_zombie_trainer_is_refused(serve_buffer: ServeBuffer) -> None:
    client, old = filled(serve_buffer)
    batch, prefetched = draw(client, old, 1), draw(client, old, 2)
    ack(client, old, 1, batch)
    new = start_lineage(client, START)
    before = client.run()
    for attempt in (
        lambda: ack(client, old, 1, batch),
        lambda: ack(client, old, 2, prefetched),
        lambda: draw(client, old, 3),
        lambda: client.announce_version(VersionRequest(version="1-1", token=old.token)),
        lambda: client.register_checkpoint(CheckpointRequest(version="1-1", token=old.token, key="k")),
        lambda: client.command("done", RunCommand(token=old.token)),
        lambda: client.command("fail", RunCommand(token=old.token)),
        lambda: client.command("pause", RunCommand(token=old.token)),
    ):
        with pytest.raises(FencedError):
            attempt()
    after = client.run()
    assert (after.state, after.latest_version, after.checkpoint) == ("running", before.latest_version, None)
    with pytest.raises(ConflictError):
        ack(client, new, 1, prefetched)
    assert [(entry.lineage, entry.abandoned) for entry in acked(client)] == [(1, True)]


def test_along_the_active_lineage_every_step_appears_once(serve_buffer: ServeBuffer) -> None:
    client, first = filled(serve_buffer)
    for step in range(1, 6):
        ack(client, first, step, draw(client, first, step))
    client.register_checkpoint(CheckpointRequest(version="1-3", token=first.token, key="checkpoints/1-3"))
    run = client.run()
    assert (run.checkpoint, run.checkpoint_key, run.step) == ("1-3", "checkpoints/1-3", 5)
    second, run = start_lineage(client, PolicyVersion(1, 3)), client.run()
    assert (run.step, run.parents) == (3, {1: "0-0", 2: "1-3"})
    for step in (4, 5):
        ack(client, second, step, draw(client, second, step))
    third = start_lineage(client, PolicyVersion(2, 4))
    ack(client, third, 5, draw(client, third, 5))
    active = [(e.lineage, e.step) for e in acked(client) if not e.abandoned]
    assert active == [(1, 1), (1, 2), (1, 3), (2, 4), (3, 5)]
    run = client.run()
    check = LedgerCheck(lineage_tree(run.parents), lineage=run.lineage, step=run.step)
    for line in ledger_lines(client):
        check.take(line)
    assert check.violations() == []
    assert (check.num_starts, check.num_batches, check.num_abandoned) == (3, 8, 3)


def test_only_versions_of_the_active_history_can_be_announced(serve_buffer: ServeBuffer) -> None:
    client, first = filled(serve_buffer)
    for step in (1, 2, 3, 4):
        ack(client, first, step, draw(client, first, step))
    second = start_lineage(client, PolicyVersion(1, 3))
    for version in ("1-4", "5-1"):
        with pytest.raises(ConflictError, match="history"):
            client.announce_version(VersionRequest(version=version, token=second.token))
    request = VersionRequest(version="2-4", token=second.token)
    assert client.announce_version(request) == client.announce_version(request)
    assert client.run().latest_version == "2-4"
    assert client.stats().num_publications == 3


def test_a_late_attempt_of_a_trainer_start_changes_nothing(serve_buffer: ServeBuffer) -> None:
    client, _ = filled(serve_buffer)
    request = LineageRequest(trainer_id="t", parent="1-0")
    first = client.new_lineage(request)
    ack(client, first, 1, draw(client, first, 1))
    prefetched, ledger = draw(client, first, 2), client.ledger()
    assert client.new_lineage(request) == first
    assert (client.run().lineage, client.run().step, client.ledger()) == (2, 1, ledger)
    ack(client, first, 2, prefetched)

    second = client.new_lineage(LineageRequest(trainer_id="t", parent="2-1"))
    assert (second.lineage, second.token != first.token) == (3, True)
    assert client.new_lineage(request) == first  # its own token, which is fenced
    with pytest.raises(FencedError):
        client.announce_version(VersionRequest(version="2-2", token=first.token))
    ack(client, second, 2, draw(client, second, 2))
    run = client.run()
    assert (run.lineage, run.step, run.parents) == (3, 2, {1: "0-0", 2: "1-0", 3: "2-1"})
    with pytest.raises(ConflictError, match="this request id took lineage 2 from version 1-0, not 2-1"):
        client.new_lineage(request.model_copy(update={"parent": "2-1"}))
    assert client.run().lineage == 3


def test_a_late_repeat_of_a_mark_changes_nothing(serve_buffer: ServeBuffer) -> None:
    client, first = filled(serve_buffer)
    requests = [VersionRequest(version=f"1-{step}", token=first.token) for step in (1, 2, 3)]
    replies = [client.announce_version(request) for request in requests]
    before = client.stats()
    assert [client.announce_version(request) for request in reversed(requests)] == replies[::-1]
    assert client.run().latest_version == "1-3"
    after = client.stats()
    assert (after.num_publications, after.log_position) == (before.num_publications, before.log_position)


def test_a_new_lineage_announces_the_version_it_starts_from_once_more(serve_buffer: ServeBuffer) -> None:
    client, first = filled(serve_buffer)
    replies = [client.announce_version(VersionRequest(version=f"1-{step}", token=first.token)) for step in (1, 2)]
    second = start_lineage(client, PolicyVersion(1, 1), mark=False)
    request = VersionRequest(version="1-1", token=second.token)
    again = client.announce_version(request)
    assert again.log_position > replies[-1].log_position
    assert client.run().latest_version == "1-1"
    client.announce_version(VersionRequest(version="2-2", token=second.token))
    assert client.announce_version(request) == again
    assert client.run().latest_version == "2-2"
    assert client.stats().log_position == again.log_position + 1


def test_a_lineage_starts_from_a_version_that_was_made(serve_buffer: ServeBuffer) -> None:
    client, first = filled(serve_buffer)
    for step in (1, 2, 3):
        ack(client, first, step, draw(client, first, step))
    for parent in ("9-1", "0-5", "1-4", "2-3"):
        with pytest.raises(ConflictError, match="no trainer made"):
            client.new_lineage(LineageRequest(trainer_id="t", parent=parent))
    assert client.run().lineage == 1
    client.announce_version(VersionRequest(version="1-5", token=first.token))
    client.register_checkpoint(CheckpointRequest(version="1-6", token=first.token, key="k"))
    for parent, lineage in (
        (PolicyVersion(1, 6), 2),  # checkpointed; a start before it is no longer followed by a resume from it
        (PolicyVersion(1, 2), 3),  # acked
        (PolicyVersion(3, 2), 4),  # the start of its lineage, under its own name
        (PolicyVersion(1, 5), 5),  # announced
        (START, 6),
    ):
        assert start_lineage(client, parent, mark=False).lineage == lineage
        assert client.run().step == parent.step
    starts = [line for line in client.ledger().entries if isinstance(line, ResumeEntry)]
    parents = ["0-0", "1-6", "1-2", "3-2", "1-5", "0-0"]
    assert [(start.lineage, start.parent) for start in starts] == list(enumerate(parents, 1))


def test_a_draw_waits_for_rollouts_and_is_woken_by_them(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    client, lineage = buffer.begin(8)
    assert wait_of(client, lineage, 1, wait_s=0.2) == "rollouts"
    batches: list[Batch] = []
    thread = threading.Thread(target=lambda: batches.append(draw(buffer.client(), lineage, 1, wait_s=60)))
    thread.start()
    until("it waits", lambda: any((wait.owner, wait.name) == ("t", "rollouts") for wait in client.run().waits))
    client.push(make_payloads([f"train-{i}" for i in range(8)]))
    thread.join(timeout=DEADLINE_S)
    assert len(batches) == 1
    assert client.run().waits == []


def test_paused_draws_wait_and_stopping_ends_them(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer)
    batch = draw(client, lineage, 1)
    assert client.command("pause", RunCommand(reason="look")).state_reason == "look"
    assert wait_of(client, lineage, 2) == "run-paused"
    client.command("resume", RunCommand())
    draw(client, lineage, 2)
    client.command("stop", RunCommand())
    with pytest.raises(RunOverError):
        draw(client, lineage, 3)
    ack(client, lineage, 1, batch)
    with pytest.raises(ConflictError):
        client.command("pause", RunCommand())
    assert [client.command("done", RunCommand(token=lineage.token)).state for _ in range(2)] == ["done"] * 2
    second = start_lineage(client, PolicyVersion(1, 1))
    assert client.run().state == "running"
    client.command("done", RunCommand(token=second.token))
    assert client.command("resume", RunCommand()).state == "running"
    ack(client, second, 2, draw(client, second, 2))
    whole = client.run_changes()
    assert [(item.number, item.role, item.command, item.reason, item.old, item.new) for item in whole.changes] == [
        (1, "operator", "pause", "look", "running", "paused"),
        (2, "operator", "resume", None, "paused", "running"),
        (3, "operator", "stop", None, "running", "stopping"),
        (4, "trainer", "done", None, "stopping", "done"),  # said twice, changed once
        (5, "trainer", "lineage", None, "done", "running"),
        (6, "trainer", "done", None, "running", "done"),
        (7, "operator", "resume", None, "done", "running"),
    ]
    assert [(item.lineage, item.step) for item in whole.changes] == [(1, 0)] * 3 + [(1, 1)] + [(2, 1)] * 3
    assert all(abs(item.at_s - time.time()) < 600 for item in whole.changes)
    assert client.run_changes(after=6).changes == [client.run().last_change]


def test_a_run_that_has_all_its_steps_is_not_resumed_after_its_end(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, trainer={"num_steps": 1})
    ack(client, lineage, 1, draw(client, lineage, 1))
    client.command("pause", RunCommand())
    assert client.command("resume", RunCommand()).state == "running", "the trainer has not ended"
    client.command("done", RunCommand(token=lineage.token))
    with pytest.raises(ConflictError, match=r"trainer\.num_steps"):
        client.command("resume", RunCommand())
    assert client.run().state == "done"


def test_with_m_1_the_trainer_waits_for_recent_data_and_searchers_bring_it(serve_buffer: ServeBuffer) -> None:
    flow = {"samples_per_insert": 1.0, "samples_per_insert_error": 16}
    client, lineage = filled(serve_buffer, sampling={"most_on_policy_prob": 1.0, **flow})
    for version in ("1-1", "1-2"):
        client.announce_version(VersionRequest(version=version, token=lineage.token))
    assert wait_of(client, lineage, 1) == "recent"
    # generation is ahead of the trainer, and goes on all the same: what is stored is of no use to it
    assert client.lease(LeaseRequest(searcher_id="s", max_leases=1)).leases
    client.push(make_payloads(["train-0", "train-1", "train-2"]))
    assert wait_of(client, lineage, 1) == "recent"
    client.push(make_payloads(["train-3"]))
    batch = draw(client, lineage, 1)
    assert {(group.source, group.fallback) for group in batch.groups} == {("recent", False)}


def test_realised_m_counts_slots_that_really_drew_recent_data(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, sampling={"most_on_policy_prob": 1.0, "recent_shortage": "draw"})
    for version in ("1-1", "1-2"):
        client.announce_version(VersionRequest(version=version, token=lineage.token))
    client.push(make_payloads(["train-0", "train-1", "train-2"]))
    batch = draw(client, lineage, 1)
    assert sorted(group.source for group in batch.groups) == ["recent", "recent", "recent", "replay"]
    assert sum(group.fallback for group in batch.groups) == 1
    stats = client.stats()
    assert (stats.realised_most_on_policy, stats.slots["fallback"]) == (0.75, 1)


def test_rollouts_without_a_reward_hold_generation_back_under_a_name_of_their_own(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer(sampling={"samples_per_insert": 1.0, "samples_per_insert_error": 16}).begin(8)
    request = LeaseRequest(searcher_id="s", max_leases=1)
    client.push([encode_rollout(make_rollout(reward=None)) for _ in range(16)])
    reply = client.lease(request)
    assert (reply.leases, reply.wait) == ([], "unscored")
    client.push(make_payloads([f"train-{i}" for i in range(8)]))
    assert client.lease(request).wait == "trainer-ahead"


def test_void_batches_do_not_count_as_drawn_for_flow_control(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, sampling={"samples_per_insert": 1.0, "samples_per_insert_error": 16})
    for step in range(1, 5):
        draw(client, lineage, step)
    assert wait_of(client, lineage, 5) == "samples-per-insert"
    second = start_lineage(client)
    for step in range(1, 5):
        draw(client, second, step)


@pytest.mark.parametrize("how", ["deadline", "lineage"])
def test_a_batch_of_an_earlier_interval_that_becomes_void_gives_this_interval_no_more_batches(
    serve_buffer: ServeBuffer, how: str
) -> None:
    client, lineage = filled(
        serve_buffer, sampling={"alternate": True}, trainer={"sync_interval": 2}, buffer={"batch_deadline_s": 1000.0}
    )
    draw(client, lineage, 1)
    draw(client, lineage, 2)
    client.announce_version(VersionRequest(version=f"{lineage.lineage}-1", token=lineage.token))
    client.push(make_payloads([f"train-{i}" for i in range(8)]))
    if how == "deadline":
        later(client, 1001.0)
    else:
        lineage = start_lineage(client, mark=False)
    draw(client, lineage, 3)
    draw(client, lineage, 4)
    assert wait_of(client, lineage, 5) == "alternate-generate"


def test_a_void_batch_of_this_interval_is_drawn_again(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(
        serve_buffer, sampling={"alternate": True}, trainer={"sync_interval": 1}, buffer={"batch_deadline_s": 1000.0}
    )
    batch = draw(client, lineage, 1)
    assert wait_of(client, lineage, 2) == "alternate-generate"
    assert draw(client, lineage, 1).batch_id == batch.batch_id, "an open batch waits for nothing"
    later(client, 1001.0)
    assert draw(client, lineage, 1).batch_id != batch.batch_id
    lineage = start_lineage(client, mark=False)
    assert draw(client, lineage, 1).batch_id


def test_a_lineage_from_before_the_registered_checkpoint_moves_or_clears_it_and_counts_rollbacks(
    serve_buffer: ServeBuffer,
) -> None:
    lineage = start_lineage(client := serve_buffer().client())

    def registered() -> tuple[str | None, str | None, int]:
        info = client.run()
        return info.checkpoint, info.checkpoint_key, info.num_rollbacks

    for step in (5, 10):
        key = f"checkpoints/1-{step}"
        client.register_checkpoint(CheckpointRequest(version=f"1-{step}", token=lineage.token, key=key))
    client.announce_version(VersionRequest(version="1-5", token=lineage.token))
    client.new_lineage(LineageRequest(trainer_id="t", parent="1-10", checkpoint_key="checkpoints/1-10"))
    assert registered() == ("1-10", "checkpoints/1-10", 0)
    back = LineageRequest(trainer_id="t", parent="1-5", checkpoint_key="checkpoints/1-5", rollback=True)
    reply = client.new_lineage(back)
    assert registered() == ("1-5", "checkpoints/1-5", 1)
    client.register_checkpoint(CheckpointRequest(version="3-7", token=reply.token, key="checkpoints/3-7"))
    assert client.new_lineage(back) == reply  # a late repeat
    assert registered() == ("3-7", "checkpoints/3-7", 1)
    client.new_lineage(LineageRequest(trainer_id="t", parent="0-0", rollback=True))
    assert registered() == (None, None, 2)
    client.new_lineage(LineageRequest(trainer_id="t", parent="0-0"))
    assert registered() == (None, None, 2)
