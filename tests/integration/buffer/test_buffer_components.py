"""The components of GET /v1/run, what they wait for, and the metrics of them: over a real buffer and Redis."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import tba_buffer.monitoring.metrics
from redis import Redis
from tba_buffer.run.components import MAX_NAMES, OTHER_NAMES
from tba_buffer.storage.keys import Keys

from tba.api import ComponentInfo, RunCommand
from tba.clients import BufferClient
from tba.errors import BusyError, ConflictError, RunFailedError, UnauthorizedError
from tba.wire import STARTED_AT_S, WAITED_S, Wait, encode_heartbeat
from tba.wire.heartbeat import MAX_HEARTBEAT_BYTES
from tests.support.answering import answering
from tests.support.buffer import make_heartbeat, start_lineage
from tests.support.buffer_fixtures import ServeBuffer, later
from tests.support.buffer_reads import ask
from tests.support.leases import draw
from tests.support.metrics import metrics_of, values
from tests.support.waits import until


def beat(client: BufferClient, component_id: str, kind: str, *, state: str = "at-work", **fields: object) -> None:
    client.heartbeat(make_heartbeat(component_id, kind, state=state, **fields))


def trainer_waited(client: BufferClient, trainer: str, started_at_s: float, **waited_s: float) -> None:
    gauges = {f"{WAITED_S}{name.replace('_', '-')}": value for name, value in waited_s.items()}
    beat(client, trainer, "trainer", gauges={STARTED_AT_S: started_at_s, **gauges})


def component(client: BufferClient, kind: str) -> ComponentInfo:
    (found,) = [item for item in client.run().components if item.kind == kind]
    return found


def waited(client: BufferClient, name: str) -> float:
    return values(client.base_url, "tba_trainer_wait_seconds_total")[(name,)]


def test_what_a_trainer_waited_is_counted_once_whatever_becomes_of_its_heartbeats(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    assert waited(client, "samples-per-insert") == 0.0, "a rate needs a first value"
    trainer_waited(client, "t", 1000.25, samples_per_insert=2.0)
    trainer_waited(client, "t", 1000.25, samples_per_insert=2.0)  # repeated: its answer was lost
    trainer_waited(client, "t", 1000.25, samples_per_insert=7.5, rollouts=1.0)  # one between them never came
    trainer_waited(client, "t", 1000.25, samples_per_insert=4.0)  # late
    assert (waited(client, "samples-per-insert"), waited(client, "rollouts")) == (7.5, 1.0)


def test_the_count_continues_over_the_death_of_trainer_and_buffer(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    client = buffer.client()
    trainer_waited(client, "t", 1000.0, batch=5.0)
    trainer_waited(client, "t", 2000.0, batch=1.5)  # a container that started again: the same name and process number
    trainer_waited(client, "t", 1000.0, batch=6.0)  # late, from the dead trainer: it looks like a repeat
    trainer_waited(client, "other", 2000.0, batch=0.25)
    assert waited(client, "batch") == 6.75
    buffer.stop()
    client = serve_buffer().client()
    assert waited(client, "batch") == 6.75
    trainer_waited(client, "t", 2000.0, batch=2.5)
    assert waited(client, "batch") == 7.75


def test_only_trainers_are_counted_and_names_stay_few(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    beat(client, "s", "searcher", gauges={STARTED_AT_S: 1.0, f"{WAITED_S}batch": 99.0})
    beat(client, "old-release", "trainer", gauges={f"{WAITED_S}batch": 99.0})
    assert waited(client, "batch") == 0.0
    names = {f"w{i}": 1.0 for i in range(MAX_NAMES + 10)}
    trainer_waited(client, "t", 1.0, **names)
    trainer_waited(client, "t", 1.0, **dict.fromkeys(names, 2.0))
    counted = values(client.base_url, "tba_trainer_wait_seconds_total")
    assert (counted[(OTHER_NAMES,)], sum(counted.values())) == (20.0, 2.0 * len(names))


def test_the_time_of_components_is_counted_over_restarts(serve_buffer: ServeBuffer) -> None:
    settings = {"HEARTBEAT_TIMEOUT_S": 1000.0}
    buffer = serve_buffer(buffer=settings)
    client, begin_s = buffer.client(), time.time()
    assert client.stats().component_seconds == {}

    def beats(*names: str, state: str = "at-work") -> None:
        for name in names:
            beat(client, name, "searcher" if name.startswith("s") else "trainer", state=state)

    beats("s1", "s2", "t")
    later(client, 100.0)
    beats("s1", "s1", "s2")
    beats("t", state="ended")
    later(client, 5000.0)
    beats("s1", "t")  # one that was silent counts until it was lost; the trainer had ended
    later(client, 50.0)
    beats("t")
    took_s = 5 * (time.time() - begin_s) + 0.1
    found = client.stats()
    assert found.component_seconds == {
        "searcher": pytest.approx(2 * 100 + 1000, abs=took_s),
        "trainer": pytest.approx(100 + 50, abs=took_s),
    }
    assert values(buffer.url, "tba_component_seconds_total")[("trainer",)] == found.component_seconds["trainer"]
    buffer.stop()
    client = serve_buffer(buffer=settings).client()
    later(client, 5150.0)
    assert client.stats().component_seconds == found.component_seconds
    later(client, 200.0)
    beats("t")  # it was heard of before the restart
    assert client.stats().component_seconds["trainer"] >= found.component_seconds["trainer"] + 200


def test_a_component_shows_its_wait_while_it_is_alive(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(buffer={"HEARTBEAT_TIMEOUT_S": 1000.0}).client()
    beat(client, "s-1", "searcher", wait=Wait(name="no-version", for_s=3.0, deadline_in_s=60.0))
    wait = component(client, "searcher").wait
    assert wait is not None
    assert (wait.name, wait.for_s >= 3.0, wait.deadline_in_s <= 60.0) == ("no-version", True, True)
    assert [(item.owner, item.kind, item.name) for item in client.run().waits] == [("s-1", "searcher", "no-version")]
    assert values(client.base_url, "tba_component_wait_seconds")[("searcher", "no-version")] >= 3.0
    assert values(client.base_url, "tba_waits")[("no-version",)] == 1
    later(client, 1001.0)
    assert not component(client, "searcher").alive, "silence is noticed"
    assert component(client, "searcher").wait is None
    assert values(client.base_url, "tba_component_wait_seconds") == {}
    assert values(client.base_url, "tba_components_silent")[("searcher",)] == 1
    beat(client, "s-1", "searcher", state="ended")
    later(client, 1001.0)
    assert not component(client, "searcher").alive, "its end too"
    assert values(client.base_url, "tba_components_silent")[("searcher",)] == 0


def test_ages_are_those_of_the_newest_beat_and_late_waits_show(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(buffer={"HEARTBEAT_TIMEOUT_S": 1000.0})
    client = buffer.client()
    assert ("trainer",) not in values(buffer.url, "tba_component_heartbeat_age_seconds")
    beat(client, "t-1", "trainer")
    later(client, 100.0)
    old_s = component(client, "trainer").heartbeat_age_s
    beat(client, "t-2", "trainer", wait=Wait(name="batch", for_s=50.0, deadline_in_s=-20.0))
    assert values(buffer.url, "tba_component_heartbeat_age_seconds")[("trainer",)] < old_s
    overdue = values(buffer.url, "tba_component_wait_overdue_seconds")
    assert 20.0 <= overdue[("trainer",)] < 80.0
    assert overdue[("searcher",)] == 0.0
    alive = values(buffer.url, "tba_components_alive")
    assert (alive[("trainer",)], alive[("searcher",)], alive[("buffer",)]) == (2, 0, 1)


def test_a_draw_that_is_held_is_a_wait_of_the_trainer(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    lineage = start_lineage(client := buffer.client())
    answers: list[BaseException] = []

    def wait_for_batch() -> None:
        try:
            draw(buffer.client(), lineage, wait_s=60)
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=wait_for_batch, daemon=True)
    thread.start()
    (wait,) = until("the draw is held", lambda: client.run().waits)
    assert (wait.owner, wait.kind, wait.name) == ("t", "trainer", "rollouts")
    assert ("trainer", "rollouts") in values(buffer.url, "tba_component_wait_seconds")
    assert component(client, "buffer").wait is None, "it is not the buffer that waits"
    client.command("stop", RunCommand())
    thread.join(timeout=60)
    assert len(answers) == 1
    assert not isinstance(answers[0], BusyError)


def test_the_state_and_the_step_of_the_run_are_metrics(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(searcher={"num_searchers": 3}).client()
    assert values(client.base_url, "tba_run_state")[("running",)] == 1
    client.command("pause", RunCommand())
    states = values(client.base_url, "tba_run_state")
    assert (states[("paused",)], sum(states.values()), len(states)) == (1, 1, 5)
    assert values(client.base_url, "tba_run_step") == {(): 0}
    assert "tba_searchers_desired" in {family.name for family in metrics_of(client.base_url)}


def test_heartbeats_of_another_run_or_under_the_id_of_another_kind_are_refused(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    beat(client, "one", "trainer")
    with pytest.raises(UnauthorizedError, match="'one' is a trainer, not a searcher"):
        beat(client, "one", "searcher")
    assert component(client, "trainer").component_id == "one"
    with pytest.raises(ConflictError, match="other"):
        beat(client, "x", "searcher", run="other")
    assert [item for item in client.run().components if item.kind == "searcher"] == []


def test_the_reward_service_is_a_component_with_its_reason(serve_buffer: ServeBuffer) -> None:
    problem = b'{"type": "urn:tba:problem:not-ready", "status": 503, "detail": "the model of `judge` is loading"}'
    answers = [(503, problem)]
    with answering(answers) as (url, asked):
        buffer = serve_buffer(reward={"url": url}, buffer={"HEARTBEAT_TIMEOUT_S": 30.0, "PROBE_S": 0.05})
        client = buffer.client()
        until("it was asked", lambda: component(client, "reward").alive)
        found = component(client, "reward")
        assert (found.state, found.note) == ("not-ready", "the model of `judge` is loading")
        answers.append((200, b'{"status": "ok"}'))
        until("it is ready", lambda: component(client, "reward").state == "ready")
        assert component(client, "reward").note is None
        answers.append((200, READY_WITH_NOTE))
        until("it is noted", lambda: component(client, "reward").note == "judged: http: no connection")
        assert component(client, "reward").state == "ready"
        assert set(asked) == {"/readyz"}
        assert values(buffer.url, "tba_components_alive")[("reward",)] == 1
    until("it is away", lambda: component(client, "reward").state == "unreachable")
    found = component(client, "reward")
    assert not found.alive
    assert url in str(found.note)
    assert values(buffer.url, "tba_components_alive")[("reward",)] == 0


READY_WITH_NOTE = b'{"status": "ok", "note": "judged: http: no connection"}'
BROKEN = b'{"type": "urn:tba:problem:broken-reward", "status": 503, "detail": "task t: python: KeyError: no answer"}'


def test_a_reward_function_that_raises_for_every_item_fails_the_run_with_its_text(serve_buffer: ServeBuffer) -> None:
    answers = [(503, BROKEN)]
    with answering(answers) as (url, asked):
        lineage = start_lineage(client := serve_buffer(reward={"url": url}, buffer={"PROBE_S": 0.05}).client())
        until("the run has failed", lambda: client.run().state == "failed")
        info = client.run()
        assert info.state_reason == "task t: python: KeyError: no answer"
        assert info.last_change is not None
        assert (info.last_change.role, info.last_change.command) == ("buffer", "fail")
        with pytest.raises(RunFailedError, match="the run has failed"):
            draw(client, lineage)
        num_asked = len(asked)
        until("it was asked again", lambda: len(asked) > num_asked + 3)
        assert len(client.run_changes().changes) == 1, "said once"
        answers.append((200, b'{"status": "ok"}'))
        until("it is fixed", lambda: component(client, "reward").state == "ready")
        start_lineage(client)
        assert client.run().state == "running"


def test_gauges_of_heartbeats_are_metrics(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    beat(client, "s-1", "searcher", gauges={"tokens_per_s": 100.0, "unpushed": 1.0})
    beat(client, "s-2", "searcher", gauges={"tokens_per_s": 50.0})
    beat(client, "t-1", "trainer", gauges={"loss": 9.0})
    beat(client, "t-2", "trainer", gauges={"loss": 0.5, STARTED_AT_S: 7.0, f"{WAITED_S}batch": 1.0})
    assert values(client.base_url, "tba_searcher_gauge") == {("tokens_per_s",): 150.0, ("unpushed",): 1.0}
    assert values(client.base_url, "tba_trainer_gauge") == {("loss",): 0.5}
    beat(client, "t-2", "trainer", gauges={f"g{i}": 1.0 for i in range(200)})
    assert len(values(client.base_url, "tba_trainer_gauge")) == tba_buffer.monitoring.metrics.MAX_NAMES


def test_only_the_trainers_that_started_last_are_remembered_and_every_wait_stays_counted(
    serve_buffer: ServeBuffer, raw: Redis
) -> None:
    client = serve_buffer(buffer={"MAX_TRAINERS": 3}).client()
    for number in range(6):
        trainer_waited(client, f"t-{number}", 100.0 + number, rollouts=2.0)
    trainer_waited(client, "t-5", 105.0, rollouts=3.0)
    fields: Any = raw.hkeys(Keys("test").trainer_waits)
    assert sorted(field for field in fields if field.startswith(b"seen:")) == [b"seen:t-3", b"seen:t-4", b"seen:t-5"]
    assert waited(client, "rollouts") == 13.0


def test_the_run_names_what_of_its_recipe_is_constant(serve_buffer: ServeBuffer) -> None:
    constants = serve_buffer().client().run().constants
    assert (constants["run.name"], constants["model.policy_temperature"]) == ("test", 1.0)
    assert constants.keys() >= {"model.path", "model.dtype", "model.lora", "store.url"}
    assert not any("redis" in key or "token" in key for key in constants)


def raw_beat(client: BufferClient, name: str, *, kind: str = "searcher", num_gauges: int = 2) -> tuple[int, bytes]:
    gauges = {f"gauge-{i:03d}-{'x' * 20}": 0.5 for i in range(num_gauges)}
    message = encode_heartbeat(make_heartbeat(name, kind, gauges=gauges))
    return ask(client.base_url, "/v1/heartbeats", "POST", message)


def shown(client: BufferClient) -> set[str]:
    return {item.component_id for item in client.run().components if item.kind == "searcher"}


def test_searchers_beyond_the_bound_are_refused_with_what_to_do(serve_buffer: ServeBuffer) -> None:
    bound = {"MAX_SEARCHERS_SHOWN": 3, "HEARTBEAT_TIMEOUT_S": 1000.0}
    client = serve_buffer(buffer=bound).client()
    assert [raw_beat(client, f"s-{i}")[0] for i in range(3)] == [204] * 3
    status, answer = raw_beat(client, "s-3")
    problem = json.loads(answer)
    assert (status, problem["wait"], problem["retry_after_s"]) == (429, "component-slots", 1000.0)
    assert "give restarted searchers their old id" in problem["detail"]
    assert raw_beat(client, "s-1")[0] == 204, "who has a place keeps it"
    assert raw_beat(client, "t-0", kind="trainer")[0] == 204, "a trainer does not compete with searchers"
    assert shown(client) == {"s-0", "s-1", "s-2"}
    again = serve_buffer(buffer=bound).client()
    assert raw_beat(again, "s-3")[0] == 429, "places outlive the process"
    later(again, 1001.0)
    assert raw_beat(again, "s-3")[0] == 204, "it takes the place of one that is silent"
    assert len(shown(again)) == 3


def test_one_that_has_ended_gives_its_place_away_at_once(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(buffer={"MAX_SEARCHERS_SHOWN": 2, "HEARTBEAT_TIMEOUT_S": 1000.0}).client()
    for component_id, state in (("s-0", "running"), ("s-1", "ended")):
        beat(client, component_id, "searcher", state=state)
    assert raw_beat(client, "s-2")[0] == 204
    assert shown(client) == {"s-0", "s-2"}


def test_a_flood_of_large_heartbeats_leaves_the_run_readable(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(buffer={"HEARTBEAT_TIMEOUT_S": 1000.0, "MAX_SEARCHERS_SHOWN": 100}).client()
    assert raw_beat(client, "large", num_gauges=255)[0] == 413
    assert raw_beat(client, "t", kind="trainer", num_gauges=255)[0] == 204, "a trainer has its metrics among its gauges"
    answers = [raw_beat(client, f"s-{i}", num_gauges=90)[0] for i in range(150)]
    assert (answers.count(204), answers.count(429)) == (100, 50)
    assert len(ask(client.base_url, "/v1/run")[1]) < 100 * MAX_HEARTBEAT_BYTES * 1.5
