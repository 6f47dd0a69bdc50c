"""A real vLLM server on the CPU, as `vllm serve` starts it (the wheel for the CPU lacks that command).

`python -m tests.support.vllm_server ARGUMENTS` is the process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.redis_process import free_port
from tests.support.vllm_greedy import ENVIRON, TIMEOUT_S

ROOT = Path(__file__).parents[2]
CONTEXT_TOKENS = 512
STOP_S = 20.0


@contextmanager
def vllm_server(model: Path, log: Path, *, token: str, cache: Path) -> Iterator[str]:
    """Serve a model in float32 with the settings of docs/searcher.md; yield the address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = {name: value for name, value in ENVIRON.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"} | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_API_KEY": token,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    arguments = [
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "4", "--block-size", "32"),
        *("--kv-cache-memory-bytes", str(32 << 20), "--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            env=os.environ | environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + TIMEOUT_S
        while not _is_healthy(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, f"not healthy after {TIMEOUT_S} s: {log.read_text()[-3000:]}"
            time.sleep(0.2)
        yield url
    finally:
        # its own end removes its shared memory
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        # the whole session: vLLM's worker processes must not outlive a server that hangs
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(url: str, path: str, body: dict[str, Any]) -> None:
    """Post JSON as another client of the server."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()


def num_generated_tokens(url: str) -> float:
    """Return how many tokens the server has generated for all requests."""
    lines = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def _is_healthy(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    # vLLM starts two more processes, and on the CPU insists that each imports everything again: 12 CPU seconds
    whole = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: whole("fork")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
