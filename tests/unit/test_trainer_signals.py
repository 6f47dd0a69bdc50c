"""A signal stops the trainer, whatever lock the main thread holds at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from tba_trainer.loop.shutdown import stop_on_signals

UNDER_LOCK = """
import os, signal, threading
from tba_trainer.loop.shutdown import stop_on_signals
stop = threading.Event()
with stop_on_signals(stop):
    with stop._cond:  # what Event.set needs, and is not re-entrant
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
    assert stop.wait(30)
print("stopped")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event_and_the_old_handler_comes_back(number: signal.Signals):
    before = signal.getsignal(number)
    stop = threading.Event()
    with stop_on_signals(stop):
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(30)
    assert signal.getsignal(number) is before


def test_a_signal_while_the_main_thread_holds_a_lock_does_not_hang():
    done = subprocess.run([sys.executable, "-c", UNDER_LOCK], capture_output=True, text=True, timeout=180)
    assert done.stdout.endswith("stopped\n"), done.stderr
