"""A trainer that is told to stop before it has anything to keep."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.buffer import SERVICE_PATHS, make_recipe, write_recipe
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import DEADLINE_S

RETRY_S = 3600.0
"""The trainer would wait for the buffer so long."""


def test_the_processes_of_a_trainer_that_waits_for_the_buffer_end_at_once_with_143(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_buffer:
        silent_buffer.settimeout(DEADLINE_S)
        recipe = make_recipe(
            model={"path": str(make_tiny_model(tmp_path / "model", hidden_size=32))},
            buffer={"url": f"http://127.0.0.1:{silent_buffer.getsockname()[1]}"},
            store={"url": f"file://{tmp_path / 'store'}"},
            trainer={"retry_s": RETRY_S},
        )
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        log_path = tmp_path / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tba_trainer.distributed.launch", "2"),
                    *("--config", str(write_recipe(tmp_path / "recipe.json", recipe))),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS)),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(scratch),
                },
                stdout=log,
                stderr=log,
            )
        try:
            connection, _ = silent_buffer.accept()  # the leader has its model and asks for the run
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
            connection.close()
        finally:
            process.kill()
            process.wait()
    said = log_path.read_text()
    assert "Traceback" not in said
    assert "trainer: SIGTERM while it starts: it ends\n" in said
    assert not list(scratch.glob("tba-trainer-*"))
