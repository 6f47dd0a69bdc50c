"""Log lines: their order, their run, repeated warnings, and calls that are retried."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import structlog

from tba.logs import RepeatLimit
from tests.support.redis_process import free_port

SERVICE = """
import sys
from tba.clients import BufferClient
from tba.errors import UnavailableError
from tba.logs import configure_logging
configure_logging(service="trainer", run="demo")
try:
    BufferClient(sys.argv[1], retry_s=4.0).run()
except UnavailableError as error:
    print(error)
"""


def test_a_service_logs_the_first_retry_of_a_call_and_no_other() -> None:
    """4 s are time for three retries or more: they come 0.1 s to 3 s after each other."""
    words = [sys.executable, "-c", SERVICE, f"http://127.0.0.1:{free_port()}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "does not answer" in done.stdout
    [line] = [json.loads(text) for text in done.stderr.splitlines()]
    found = (line["event"], line["source"], line["level"], line["service"])
    assert found == ("call_is_retried", "retries", "warning", "trainer")
    assert "does not answer" in line["error"]


LINES = """
import logging, threading
from tba.logs import configure_logging, get_logger
configure_logging(service="trainer", run="demo")
get_logger("loop").info("begun", step=1, error="no answer from http://u:PASSWORD@mlflow:5000/api?api_key=SECRET")
thread = threading.Thread(target=lambda: get_logger("publisher").warning("late", version="1-4"))
thread.start()
thread.join()
logging.getLogger("uvicorn.error").warning("of a library")
"""


def test_every_line_has_the_time_first_and_the_run_also_in_a_thread_and_of_a_library() -> None:
    done = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(text) for text in done.stderr.splitlines()]
    assert {line["event"] for line in lines} == {"begun", "late", "of a library"}
    for line in lines:
        assert list(line)[:3] == ["timestamp", "level", "event"]
        assert (line["service"], line["run_id"]) == ("trainer", "demo")
    [begun] = [line for line in lines if line["event"] == "begun"]
    assert begun["error"] == "no answer from http://mlflow:5000/api"


def test_on_a_terminal_a_word_that_is_no_form_is_as_none() -> None:
    forms = {}
    for word in ("json", "auto"):
        screen, terminal = os.openpty()
        environ = os.environ | {"TBA_LOG_FORMAT": word}
        subprocess.run([sys.executable, "-c", LINES], stderr=terminal, env=environ, timeout=60, check=True)
        os.close(terminal)
        forms[word] = os.read(screen, 1)
        os.close(screen)
    assert forms["json"] == b"{"
    assert forms["auto"] != b"{"


def test_a_warning_that_repeats_is_dropped_and_counted() -> None:
    now_s = 0.0
    limit = RepeatLimit(max_repeats=2, window_s=60.0, clock=lambda: now_s)

    def printed(source: str, event: str, method: str = "warning") -> dict[str, object] | None:
        try:
            return dict(limit(None, method, {"source": source, "event": event}))
        except structlog.DropEvent:
            return None

    of_one = [printed("store", "slow") for _ in range(5)]
    assert [line is not None for line in of_one] == [True, True, False, False, False]
    assert printed("store", "gone") is not None
    assert printed("loop", "slow") is not None
    assert all(printed("store", "slow", "error") for _ in range(5)), "an error is always printed"
    now_s = 60.0
    assert printed("store", "slow") == {"source": "store", "event": "slow", "num_dropped": 3}
    assert printed("store", "slow") == {"source": "store", "event": "slow"}


def test_the_command_line_says_one_sentence_after_its_retries() -> None:
    words = [sys.executable, "-m", "tba_cli.main", "status", "--url", f"http://127.0.0.1:{free_port()}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: http://127.0.0.1:")
    assert done.stderr.count("\n") == 1
