"""What a heartbeat of the trainer says of its waits."""

from __future__ import annotations

from tba_trainer.loop.status import Status

from tba.wire import STARTED_AT_S, WAITED_S, decode_heartbeat, encode_heartbeat


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
    assert waited() == {"batch": 2.25, "samples-per-insert": 3.5}
    assert status.waited_s == 5.75
    assert status.beat({}).wait is None
