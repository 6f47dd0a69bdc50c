"""Runs a real vLLM server for the `openai` engine, with a second client for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.redis_process import free_port
from tests.support.vllm_greedy import ENVIRON, TIMEOUT_S

ROOT = Path(__file__).parents[2]
CONTEXT_TOKENS = 16384
STOP_S = 20.0


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    url: str
    token: str

    def read(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Get a path, or post JSON to it; return the text of the answer."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.token}"}
        encoded = None if body is None else json.dumps(body).encode()
        return (
            urllib.request.urlopen(urllib.request.Request(self.url + path, encoded, headers), timeout=60)
            .read()
            .decode()
        )

    def load_beside(self, folder: Path) -> None:
        """Load a model folder without changing the label, as a second searcher or a broken reload would."""
        self.read("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def num_generated(self) -> float:
        """Return how many tokens the server has generated for all requests."""
        lines = self.read("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    def relabel(self, label: str) -> None:
        """Change the label of the weights."""
        self.read("/update_weight_version", {"new_version": label})


@contextmanager
def run_server(command: Sequence[str], log: Path, *, url: str, environ: dict[str, str], token: str) -> Iterator[None]:
    """Run a server's process for the block; the block begins when the server is healthy."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until = time.monotonic() + TIMEOUT_S
        while not _is_healthy(url, token):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, f"not healthy after {TIMEOUT_S} s: {log.read_text()[-3000:]}"
            time.sleep(0.2)
        yield
    finally:
        # its own end removes its shared memory
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        # the whole session: worker processes must not outlive a server that hangs
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def vllm(folder: Path, log: Path, *, token: str, cache: Path) -> Iterator[Served]:
    """Serve a model in float32 with vLLM, with the settings of docs/searcher.md."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = {name: value for name, value in ENVIRON.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"} | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_API_KEY": token,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    arguments = (
        *("--model", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "4", "--block-size", "32"),
        *("--kv-cache-memory-bytes", str(128 << 20), "--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
    )

    command = [sys.executable, "-m", "tests.support.vllm_server", *arguments]
    with run_server(command, log, url=url, environ=environ, token=token):
        yield Served(url, token)


def _is_healthy(url: str, token: str) -> bool:
    request = urllib.request.Request(f"{url}/health", headers={"authorization": f"Bearer {token}"})
    try:
        return urllib.request.urlopen(request, timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False
