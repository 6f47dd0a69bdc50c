"""SIGTERM and SIGINT while a service starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

BEGIN = """
import signal, sys, time
from tba.early_signals import mark_started, quit_if_starting, quit_on_signals
quit_on_signals("trainer", code=143)
"""
WAIT = """
print("ready", flush=True)
while True:  # a signal that comes just before a sleep begins is handled after it
    time.sleep(0.01)
"""
TAKEN = "signal.signal(signal.SIGTERM, lambda number, _: quit_if_starting(number))\n"
OVER = "mark_started()\nsignal.raise_signal(signal.SIGTERM)\n"


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        ("", signal.SIGTERM, 143),
        ("", signal.SIGINT, 130),
        (TAKEN, signal.SIGTERM, 143),
        (OVER, signal.SIGINT, -signal.SIGINT),
    ],
)
def test_a_signal_ends_a_start_with_its_code_and_one_line(program: str, number: signal.Signals, code: int) -> None:
    words, pipe = [sys.executable, "-c", BEGIN + program + WAIT], subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert ("KeyboardInterrupt" in err) == (program == OVER)
    assert (f"trainer: {number.name} while it starts: it ends\n" == err) == (program != OVER)
