"""SIGTERM and SIGINT while a service starts, for anything that its main thread does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import hashlib, pathlib, signal, sys, time
from tba.early_signals import delete_on_quit, quit_if_starting, quit_on_signals, mark_started
quit_on_signals("trainer", code=143)
"""
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
"""For longer than any test, in a library where no handler of Python runs."""
DEEP = f"""
folder = pathlib.Path(sys.argv[1])
with delete_on_quit(folder):
    print("ready", flush=True)
    {BUSY}
"""
TAKEN = """
signal.signal(signal.SIGTERM, lambda number, _: quit_if_starting(number))
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
OVER = """
mark_started()
signal.raise_signal(signal.SIGTERM)
try:
    print("ready", flush=True)
    while True:  # a signal that comes just before a sleep begins is handled after it
        time.sleep(0.01)
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        (DEEP, signal.SIGTERM, 143),
        (DEEP, signal.SIGINT, 130),
        (TAKEN, signal.SIGTERM, 143),
        (OVER, signal.SIGINT, 7),
    ],
)
def test_a_signal_ends_a_start_with_its_code_and_one_line(
    program: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + program, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert err == ("" if program is OVER else f"trainer: {number.name} while it starts: it ends\n")
    assert folder.exists() == (program is not DEEP)
