"""A call that is retried: one log line in a service, none on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.redis_process import free_port

SERVICE = """
import sys
from tba.clients import BufferClient
from tba.errors import UnavailableError
from tba.logs import configure_logging
configure_logging("json", service="trainer", run="demo")
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
    assert (line["event"], line["source"], line["level"], line["service"]) == (
        "call_is_retried",
        "retries",
        "warning",
        "trainer",
    )
    assert "does not answer" in line["error"]


def test_the_command_line_says_one_sentence_after_its_retries() -> None:
    words = [sys.executable, "-m", "tba_cli.main", "status", "--url", f"http://127.0.0.1:{free_port()}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: http://127.0.0.1:")
    assert done.stderr.count("\n") == 1
