"""Live settings of the buffer service over a real Redis: changing, refusing, the audit, and what acts on them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tba.api import Lease, LeaseRequest, LedgerEntry, LineageReply, RunCommand, SettingsInfo, SettingsRequest
from tba.clients import BufferClient
from tba.config import parse_live
from tba.errors import ConfigError, ConflictError
from tba_cli.reports.ledger import batch_entries
from tests.support.buffer import begin_run, make_recipe, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.buffer_reads import ask
from tests.support.leases import lease, make_step, request_eval
from tests.support.redis_process import RedisProcess

LINEAR = {"kind": "linear", "value": 1.0, "final": 0.5, "steps": 4}


def change(client: BufferClient, reason: str | None = None, token: str | None = None, **settings: Any) -> SettingsInfo:
    return client.change_settings(SettingsRequest(settings=parse_live(settings), reason=reason, token=token))


def step(client: BufferClient, lineage: LineageReply, number: int, revision: int = 0) -> dict[str, int]:
    """Draw and ack one step; how often its slots drew from what."""
    sources = [group.source for group in make_step(client, lineage, number, settings_revision=revision).groups]
    return {source: sources.count(source) for source in ("recent", "replay")}


def entries(client: BufferClient) -> list[LedgerEntry]:
    return batch_entries(client.ledger().entries)


def test_a_change_is_answered_with_what_holds_and_kept_with_who_when_why_and_what(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(objective={"beta": 0.05}).client()
    before = client.settings()
    assert (before.revision, before.settings.changed(), before.changes, before.now["beta"]) == (0, {}, [], 0.05)
    lineage = begin_run(client, 8, 3, per_prompt=6)
    step(client, lineage, 1)

    change(client, beta=LINEAR, eval_every_steps=7)
    info = change(client, "it diverges", token=lineage.token, beta=0.2)
    assert info.revision == client.settings_revision == 2
    assert info.settings.changed() == parse_live({"beta": 0.2, "eval_every_steps": 7}).changed()
    assert (info.now["beta"], info.now["eval_every_steps"]) == (0.2, 7)
    assert info.recipe.beta is not None
    assert info.recipe.beta.value == 0.05
    assert [audit.revision for audit in info.changes] == [2]

    first, second = client.settings().changes
    assert (first.role, first.reason, first.lineage, first.step) == ("operator", None, 1, 1)
    assert set(first.changes) == {"beta", "eval_every_steps"}
    assert (first.changes["eval_every_steps"].old, first.changes["eval_every_steps"].new) == (None, 7)
    assert (second.role, second.reason) == ("trainer", "it diverges")
    assert second.changes["beta"].old == first.changes["beta"].new == parse_live({"beta": LINEAR}).beta
    assert second.changes["beta"].new == parse_live({"beta": 0.2}).beta
    assert second.at_s >= first.at_s > 1e9

    back = change(client, beta=None)
    assert (set(back.settings.changed()), back.now["beta"]) == ({"eval_every_steps"}, 0.05)


def test_changes_are_read_from_a_revision_on(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    for i in range(1, 4):
        change(client, beta=float(i))
    newer = client.settings(after=1)
    assert ([audit.revision for audit in newer.changes], newer.next) == ([2, 3], None)
    assert client.settings(after=2**53 - 1).changes == []


def test_what_cannot_be_is_refused_with_key_and_value(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(objective={"preset": "tb"})
    bodies: list[tuple[Any, list[str]]] = [
        ({"policy_temperature": 0.7}, ["policy_temperature"]),
        ({"num_steps": 7}, ["settings.num_steps", "7"]),
        ({"beta": -1}, ["settings.beta", "-1"]),
        ({"beta": 0}, ["beta cannot be 0", "tb"]),
        ({"beta": True}, ["settings.beta", "True"]),
        ({"learning_rate": "fast"}, ["settings.learning_rate", "'fast'"]),
        ({"learning_rate": {"kind": "cosine", "value": 1.0}}, ["settings.learning_rate", "needs `steps`"]),
        ({"most_on_policy_prob": 1.5}, ["settings.most_on_policy_prob", "1.5", "less than or equal to 1"]),
        ({"sampling_temperature": 0}, ["settings.sampling_temperature", "equal to 0.01"]),
        ({"eval_every_steps": 0}, ["settings.eval_every_steps", "0"]),
        ({"eval_every_steps": 2.5}, ["settings.eval_every_steps", "2.5"]),
        ({"eval_every_steps": 10**400}, ["settings.eval_every_steps"]),
        ({"sampling_temperature": 1e308}, ["settings.sampling_temperature"]),
        ({}, ["settings", "name at least one of learning_rate, beta"]),
        ([], ["settings"]),
    ]
    for settings, parts in bodies:
        status, answer = ask(buffer.url, "/v1/run/settings", "PATCH", {"settings": settings})
        problem = json.loads(answer)
        assert (status, problem["type"].startswith("urn:tba:problem:")) == (422, True), settings
        assert all(part in problem["detail"] for part in parts), problem["detail"]
    assert buffer.client().settings().revision == 0


def test_a_request_that_is_repeated_changes_nothing_however_late(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    request = SettingsRequest(settings=parse_live({"beta": 0.1}))
    assert client.change_settings(request).revision == 1
    change(client, beta=0.2)
    again = client.change_settings(request)
    assert (again.revision, again.now["beta"]) == (2, 0.2)
    assert [audit.revision for audit in again.changes] == [1]


def test_a_change_for_an_older_revision_is_refused_unless_it_was_made_before(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    request = SettingsRequest(settings=parse_live({"beta": 0.1}), revision=0)
    assert client.change_settings(request).revision == 1
    change(client, beta=0.2)
    for revision in (0, 1, 3):
        late = SettingsRequest(settings=parse_live({"beta": 0.3}), revision=revision)
        with pytest.raises(ConflictError, match=f"at revision 2, and the change was made for revision {revision}"):
            client.change_settings(late)
    again = client.change_settings(request)
    assert (again.revision, again.now["beta"]) == (2, 0.2)
    newest = SettingsRequest(settings=parse_live({"beta": 0.3}), revision=2)
    assert client.change_settings(newest).now["beta"] == 0.3


def test_changes_at_once_get_a_revision_each_and_none_is_lost(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    names = ["beta", "learning_rate", "most_on_policy_prob", "sampling_temperature"]
    requests = [SettingsRequest(settings=parse_live({name: 0.25})) for name in names]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda request: buffer.client().change_settings(request), requests))
    info = buffer.client().settings()
    assert (info.revision, set(info.settings.changed())) == (4, set(names))
    assert [audit.revision for audit in info.changes] == [1, 2, 3, 4]


def test_a_run_that_failed_can_be_changed_and_one_that_is_done_cannot(serve_buffer: ServeBuffer) -> None:
    lineage = start_lineage(client := serve_buffer().client())
    client.command("fail", RunCommand(token=lineage.token))
    assert change(client, learning_rate=1e-5).revision == 1
    client.command("done", RunCommand(token=lineage.token))
    with pytest.raises(ConflictError, match="the run is done"):
        change(client, learning_rate=1e-6)


def test_m_holds_from_the_next_batch_that_is_drawn_and_the_ledger_has_it(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer(sampling={"most_on_policy_prob": 0.0}).begin(8, 3, per_prompt=6)
    assert step(client, lineage, 1) == {"recent": 0, "replay": 4}
    change(client, most_on_policy_prob=1)
    assert step(client, lineage, 2) == {"recent": 4, "replay": 0}
    change(client, most_on_policy_prob=0.25)
    step(client, lineage, 3)
    assert [entry.most_on_policy_prob for entry in entries(client)] == [0.0, 1.0, 0.25]


def test_leases_carry_the_temperature_to_sample_with(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(model={"policy_temperature": 0.7}, searcher={"sampling_temperature": 1.3}).client()
    lineage = begin_run(client, 8, 3, per_prompt=6)
    request_eval(client, lineage)

    def temperatures(leases: list[Lease]) -> set[tuple[str, float]]:
        return {(item.kind, item.temperature) for item in leases}

    assert temperatures(lease(client, 7).leases) == {("sample", 0.7), ("greedy", 0.0), ("train", 1.3)}
    change(client, sampling_temperature=0.9)
    request = LeaseRequest(searcher_id="s2", max_leases=2)
    granted = client.lease(request).leases
    assert temperatures(granted) == {("train", 0.9)}
    step(client, lineage, 1)
    change(client, sampling_temperature=0.75)
    again = client.lease(request).leases
    assert [item.lease_id for item in again] == [item.lease_id for item in granted]
    assert temperatures(again) == {("train", 0.75)}


def test_the_ledger_has_the_revision_that_each_step_was_made_with(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(8, 3, per_prompt=6)
    change(client, beta=0.1)
    change(client, beta=0.2, learning_rate=1e-5)
    for number, revision in enumerate((0, 1, 2, 2), 1):
        step(client, lineage, number, revision)
    assert [entry.settings_revision for entry in entries(client)] == [0, 1, 2, 2]


def test_settings_survive_a_restart_and_another_process_serves_them(serve_buffer: ServeBuffer) -> None:
    first = serve_buffer()
    client, lineage = first.begin(8, 3, per_prompt=6)
    change(client, "warm", beta=LINEAR, sampling_temperature=0.6)
    step(client, lineage, 1, revision=1)
    before = client.settings()
    first.stop()
    client = serve_buffer().client()
    assert client.settings() == before
    step(client, lineage, 2, revision=1)
    assert client.settings_revision == 1
    assert {item.temperature for item in lease(client).leases} == {0.6}
    assert change(client, beta=0.5).revision == 2


def test_a_buffer_with_a_recipe_that_its_live_settings_do_not_go_with_does_not_start(
    serve_buffer: ServeBuffer, redis: RedisProcess
) -> None:
    from tba_buffer.service import check_redis

    first = serve_buffer(objective={"preset": "grpo", "beta": 0.0})
    change(first.client(), learning_rate=1e-3, beta=0.0)
    first.stop()
    says = r"live settings \(revision 1\) that do not go with this recipe: .*beta cannot be 0"
    with pytest.raises(ConfigError, match=says):
        check_redis(make_recipe(objective={"preset": "tb"}, buffer={"redis_url": redis.url}))
    check_redis(make_recipe(objective={"preset": "grpo", "beta": 0.0}, buffer={"redis_url": redis.url}))
