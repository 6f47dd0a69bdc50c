"""What signals ask of `tba run`."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tba_cli.local import supervisor

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("first", "second", "after_s", "is_killed"),
    [
        (TERM, HUP, 0.5, False),  # the end of a login session
        (HUP, TERM, 0.5, False),
        (TERM, HUP, 2.0, True),
        (INT, TERM, 0.5, True),
        (INT, HUP, 0.5, True),
        (TERM, INT, 0.5, True),
        (TERM, TERM, 0.5, True),
        (INT, INT, 0.5, True),
    ],
)
def test_a_second_signal_stops_at_once_unless_both_are_one_request(
    monkeypatch: pytest.MonkeyPatch, first: signal.Signals, second: signal.Signals, after_s: float, is_killed: bool
) -> None:
    clock = SimpleNamespace(monotonic=Mock(side_effect=[1000.0, 1000.0 + after_s]))
    monkeypatch.setattr(supervisor, "time", clock)
    asked = Mock(_stop_requested=supervisor.asyncio.Event(), _processes=Mock(), _console=Mock())
    supervisor.Supervisor._on_signal(asked, first)
    assert asked._stop_requested.is_set()
    assert not asked._processes.kill.called
    supervisor.Supervisor._on_signal(asked, second)
    assert asked._processes.kill.called == is_killed
