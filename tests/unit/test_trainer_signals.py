"""A signal stops the trainer, whatever lock the main thread holds at that moment."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext

import pytest
from tba_trainer.loop.shutdown import stop_on_signals


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
