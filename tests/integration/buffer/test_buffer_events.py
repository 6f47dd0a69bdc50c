"""GET /v1/events over a real buffer and Redis: the events, their readers, and the end and continuation of a stream."""

from __future__ import annotations

import io
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import tba_buffer.run.event_streams

from tba.api import AckRequest, BatchRequest, EvalRequest, RunCommand, RunEvent, RunInfo, SettingsRequest
from tba.clients import BufferClient
from tba.config import LiveSettings
from tba.errors import BusyError, UnauthorizedError, UnavailableError
from tba.tokens import TokensFile
from tba.wire import Heartbeat, Wait
from tba_cli.commands.status import lasting_events
from tba_cli.main import main
from tests.support.buffer import make_payloads, make_prompts, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.metrics import values
from tests.support.redis_process import RedisProcess
from tests.support.waits import until

TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer", "operator", "viewer")}
QUIET = {"reward": {"url": "http://127.0.0.1:9"}}


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tba_buffer.run.event_streams, "EVERY_S", 0.05)
    monkeypatch.setattr("tba_buffer.run.event_streams.LASTING_S", 0.0)


class Follower:
    """Reads a stream in a thread."""

    def __init__(self, events: Iterator[RunEvent]) -> None:
        self.events: list[RunEvent] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(events,), daemon=True)
        self._thread.start()

    def _read(self, events: Iterator[RunEvent]) -> None:
        try:
            for event in events:
                self.events.append(event)
        except Exception as error:
            self.error = error

    def find(self, what: str, matches: Callable[[RunEvent], bool]) -> RunEvent:
        """The first event that matches, once it has come."""
        (found, *_) = until(what, lambda: [event for event in list(self.events) if matches(event)])
        return found

    def ended(self) -> bool:
        """True: the stream is over."""
        return not self._thread.is_alive()


def beat(client: BufferClient, state: str, *, component_id: str = "s-1", **fields: object) -> None:
    values: dict[str, object] = {"kind": "searcher", "wait": None, **fields}
    client.heartbeat(
        Heartbeat(component_id=component_id, run="test", state=state, version=None, **values)  # pyright: ignore[reportArgumentType]
    )


def first(buffer: BufferThread, *, last_event_id: str | None = None) -> RunEvent:
    with closing(buffer.client().events(last_event_id=last_event_id)) as events:
        return next(events)


def read_all(sock: socket.socket) -> bytes:
    """Read until the other side has closed."""
    read = b""
    with suppress(ConnectionError):
        while part := sock.recv(1 << 20):
            read += part
    return read


# ---- the events -----------------------------------------------------------------------------------------------------


def test_a_stream_tells_the_run_and_then_what_changes(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    client = buffer.client()
    client.upload_prompts(make_prompts(4, 2))
    lineage = start_lineage(client)
    follower = Follower(client.events())
    told = follower.find("the run", lambda event: event.event == "run")
    assert told is follower.events[0]
    assert RunInfo.model_validate(told.data).latest_version == "0-0"

    client.command("pause", RunCommand(reason="lunch"))
    paused = follower.find("pause", lambda event: event.data.get("state") == "paused")
    assert (paused.event, paused.data["state_reason"]) == ("change", "lunch")
    client.command("resume", RunCommand())

    beat(client, "running", wait=Wait(name="trainer-ahead", for_s=2.0, deadline_in_s=60.0))
    follower.find("a component", lambda event: event.event == "component" and event.data["component_id"] == "s-1")
    wait = follower.find("its wait", lambda event: event.event == "wait" and not event.data["over"])
    assert (wait.data["owner"], wait.data["kind"], wait.data["name"]) == ("s-1", "searcher", "trainer-ahead")
    beat(client, "running")
    follower.find("the end of it", lambda event: event.event == "wait" and event.data["over"])

    client.change_settings(SettingsRequest(settings=LiveSettings(eval_every_steps=7), reason="slow"))
    changed = follower.find("a setting", lambda event: event.event == "settings")
    assert (changed.data["role"], changed.data["reason"], changed.data["effects"]) == ("operator", "slow", [])
    client.push(make_payloads(["train-0", "train-1", "train-2", "train-3"]))
    batch = client.draw_batch(BatchRequest(trainer_id="t", lineage=1, step=1, token=lineage.token, wait_s=30))
    client.ack(batch.batch_id, AckRequest(lineage=1, step=1, token=lineage.token, settings_revision=1))
    effect = follower.find("its effect", lambda event: event.event == "settings" and bool(event.data["effects"]))
    assert [(item["name"], item["step"]) for item in effect.data["effects"]] == [("eval_every_steps", 1)]
    follower.find("the step", lambda event: event.event == "change" and event.data.get("step") == 1)

    request = {"num_prompts": 2, "num_samples": 1, "success_reward": 1.0, "timeout_s": 60, "token": lineage.token}
    client.request_eval(EvalRequest(version="0-0", **request))
    follower.find("an evaluation", lambda event: event.event == "evaluation" and event.data["version"] == "0-0")
    numbers = [int(str(event.id).split("-")[1]) for event in follower.events]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)


def test_what_stays_the_same_is_not_told_again(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    client = buffer.client()
    wait = Wait(name="trainer-ahead", for_s=2.0, deadline_in_s=60.0)
    beat(client, "running", wait=wait)
    follower = Follower(client.events())
    follower.find("the run", lambda event: event.event == "run")
    for number in range(10):
        beat(client, "running", wait=wait, gauges={"tokens_per_s": float(number)})
    beat(client, "draining")
    follower.find("the end", lambda event: event.data.get("state") == "draining")
    told = [event for event in follower.events if event.data.get("component_id") != "reward"]
    assert [event.event for event in told] == ["run", "component", "wait"]
    assert told[2].data["over"]


def test_redis_that_is_away_is_told_and_its_return_too(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    buffer = serve_buffer()
    follower = Follower(buffer.client().events())
    follower.find("the run", lambda event: event.event == "run")
    redis.stop()
    try:
        problem = follower.find("problem", lambda event: event.event == "problem")
        assert "Redis" in problem.data["detail"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{buffer.url}/v1/events", timeout=60)
        assert refused.value.code == 503
    finally:
        redis.start()
    follower.find("its end", lambda event: event.event == "problem" and event.data["detail"] is None)
    assert values(buffer.url, "tba_event_streams") == {(): 1}


# ---- continuing -----------------------------------------------------------------------------------------------------


def test_a_stream_continues_where_another_was_cut(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    client = buffer.client()
    begun = first(buffer)
    assert begun.event == "run"
    client.command("pause", RunCommand(reason="while nobody looked"))
    event = first(buffer, last_event_id=begun.id)
    assert event.event in ("change", "component")
    with closing(buffer.client().events(last_event_id=begun.id)) as events:
        paused = next(event for event in events if event.event == "change")
    assert paused.data["state_reason"] == "while nobody looked"
    for unknown in ("0-0", "gibberish", f"{str(begun.id).split('-')[0]}-999999999999999999999", "a-b-c"):
        assert first(buffer, last_event_id=unknown).event == "run"


def test_an_old_stream_ends_and_its_reader_continues(
    serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tba_buffer.run.event_streams, "RENEW_S", 0.1)
    monkeypatch.setattr(tba_buffer.run.event_streams, "KEEPALIVE_S", 0.05)
    buffer = serve_buffer()
    assert [event.event for event in buffer.client().events()][:1] == ["run"], "it ended without an error"
    said: list[str] = []
    follower = Follower(lasting_events(buffer.client(), on_progress=said.append, away_s=5.0))
    until("streams were renewed", lambda: values(buffer.url, "tba_event_streams_ended_total")[("renewed",)] >= 3)
    buffer.client().command("pause", RunCommand())
    follower.find("a change", lambda event: event.data.get("state") == "paused")
    assert [event.event for event in follower.events].count("run") == 1
    assert said == []
    buffer.stop()
    until("a buffer that stays away is given up", follower.ended)
    assert isinstance(follower.error, UnavailableError)
    assert len(said) == 1
    assert "does not answer" in said[0]


def test_a_quiet_stream_sends_comments(serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tba_buffer.run.event_streams, "KEEPALIVE_S", 0.05)
    buffer = serve_buffer()
    with urllib.request.urlopen(f"{buffer.url}/v1/events", timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        lines = iter(answer.readline, b"")
        assert next(lines) == b"retry: 1000\n"
        assert next(line for line in lines if line.startswith(b":")) == b": ping\n"


# ---- bounds and ends ------------------------------------------------------------------------------------------------


def test_more_streams_than_may_be_are_refused(serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tba_buffer.run.event_streams, "MAX_STREAMS", 2)
    monkeypatch.setattr(tba_buffer.run.event_streams, "KEEPALIVE_S", 0.05)
    buffer = serve_buffer()
    open_streams = [buffer.client().events() for _ in range(2)]
    for events in open_streams:
        next(events)
    with pytest.raises(BusyError, match="2 streams of events are open") as refused:
        first(buffer)
    assert refused.value.wait == "event-streams"
    open_streams[0].close()
    until("its place is free", lambda: values(buffer.url, "tba_event_streams") == {(): 1})
    assert first(buffer).event == "run"
    open_streams[1].close()


def test_a_reader_that_does_not_read_is_cut_off(serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    # long enough for the other reader, which reads: it shares two cores with everything else
    monkeypatch.setattr(tba_buffer.run.event_streams, "SEND_S", 3.0)
    buffer = serve_buffer()
    buffer.hold_little()
    client = buffer.client()
    host, port = buffer.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        until("the stream is open", lambda: values(buffer.url, "tba_event_streams") == {(): 1})
        follower = Follower(client.events())
        gauges = {"g" * 250 + str(number): 0.0 for number in range(60)}
        turn = 0

        def is_cut() -> bool:
            nonlocal turn
            turn += 1
            for number in range(14):
                beat(client, f"turn-{turn}", kind="trainer", component_id=f"t-{number}", gauges=gauges)
            return values(buffer.url, "tba_event_streams_ended_total")[("slow",)] == 1

        until("the slow one is cut off", is_cut)
        follower.find("the other one continues", lambda event: event.data.get("state") == f"turn-{turn}")
        assert not follower.ended()
        sock.settimeout(60)
        assert not read_all(sock).endswith(b"0\r\n\r\n"), "it was not ended but cut"
    assert values(buffer.url, "tba_event_streams") == {(): 1}


def test_a_service_that_stops_ends_its_streams_in_good_order(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    followers = [Follower(buffer.client().events()) for _ in range(3)]
    for follower in followers:
        follower.find("the run", lambda event: event.event == "run")
    buffer.stop()
    for follower in followers:
        until("the stream ends", follower.ended)
        assert follower.error is None
    assert not buffer.is_alive


def test_who_may_follow(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(tokens=TOKENS)
    for role, token in [*TOKENS.items(), ("nobody", None), ("stranger", "guess-0123456789-guess")]:
        with closing(buffer.client(token=token).events()) as events:
            if role in ("viewer", "operator"):
                assert next(events).event == "run"
            else:
                with pytest.raises(UnauthorizedError):
                    next(events)


def test_a_stream_ends_when_its_token_is_taken_away(serve_buffer: ServeBuffer, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    buffer = serve_buffer(tokens=TokensFile(path))
    trainer, viewer = (buffer.client(token=TOKENS[role]) for role in ("trainer", "viewer"))
    follower = Follower(viewer.events())
    follower.find("the run", lambda event: event.event == "run")
    path.write_text(json.dumps({**TOKENS, "viewer": "viewer-token-9876543210"}))

    def is_refused() -> bool:
        try:
            viewer.run()
        except UnauthorizedError:
            return True
        return False

    until("the buffer has read the new file", is_refused)
    lineage = start_lineage(trainer)
    trainer.command("pause", RunCommand(reason="not for everybody", token=lineage.token))
    until("the stream has ended", follower.ended)
    assert "not for everybody" not in str(follower.events)
    endings = values(buffer.url, "tba_event_streams_ended_total")
    assert endings[("unauthorized",)] == 1.0


# ---- tba status --follow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_follows_until_the_run_is_over(
    serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    # not capfd: its readouterr() garbles or loses what another thread prints at that moment
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    buffer = serve_buffer()
    client = buffer.client()
    lineage = start_lineage(client)
    codes: list[int] = []
    argv = ["status", "--url", buffer.url, "--follow", *(["--json"] if as_json else [])]
    thread = threading.Thread(target=lambda: codes.append(main(argv)), daemon=True)
    thread.start()

    def has_printed(text: str) -> bool:
        return text in out.getvalue()

    until("it follows", lambda: has_printed("running"))
    beat(client, "generating", wait=Wait(name="no-prompts", for_s=3.0, deadline_in_s=60.0))
    until("the component is told", lambda: has_printed("generating"))
    until("its wait is told", lambda: has_printed("no-prompts"))
    client.command("fail", RunCommand(token=lineage.token, reason="out of memory"))
    thread.join(timeout=60)
    assert codes == [1]
    printed = out.getvalue()
    assert "out of memory" in printed
    if as_json:
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        assert lines[0]["event"] == "run"
        assert lines[-1]["data"]["state"] == "failed"
    else:
        assert "s-1: generating, version none" in printed
        # the buffer counts on from the heartbeat, so the seconds are those of the moment when it tells the wait
        [wait] = re.findall(r"s-1 waits for 'no-prompts': (\d+) s so far, at most (\d+) s more", printed)
        for_s, left_s = map(int, wait)
        assert for_s >= 3
        assert 62 <= for_s + left_s <= 64  # each is rounded
        assert "run 'test': failed (out of memory), step 0, lineage 1" in printed
