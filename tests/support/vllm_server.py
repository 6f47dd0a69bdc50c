"""Runs a real vLLM server on the CPU, as `vllm serve` would; the wheel for the CPU lacks that command.

`python -m tests.support.vllm_server ARGUMENTS`; generation_servers.py starts it.
"""

from __future__ import annotations

import multiprocessing
import runpy

if __name__ == "__main__":
    # vLLM starts two more processes, and on the CPU insists that each imports everything again: 12 CPU seconds
    whole = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: whole("fork")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
