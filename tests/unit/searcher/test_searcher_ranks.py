"""The end of one of vLLM's processes, without vLLM: who notices it, and what is said."""

import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest
from tba_searcher.engines.engine import EngineDiedError
from tba_searcher.engines.vllm.workers import Workers


class CancelledEngine:
    """Stand in for vLLM's engine once a rank is gone: it says no more than "cancelled"."""

    def __init__(self, ranks: list[BaseProcess]) -> None:
        executor = SimpleNamespace(workers=[SimpleNamespace(proc=rank) for rank in ranks])
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor), shutdown=lambda: None)

    def step(self) -> list[Any]:
        raise RuntimeError("cancelled")


def test_the_exit_code_is_known_where_another_thread_collects_it() -> None:
    """vLLM's own thread may collect the exit code, and note it only after ours asked for it."""
    context = multiprocessing.get_context("spawn")
    ranks: list[BaseProcess] = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    popen: Any = ranks[1]._popen  # pyright: ignore[reportAttributeAccessIssue]
    asked = threading.Event()

    def poll(flag: int = os.WNOHANG) -> int | None:
        """Answer as `Popen.poll` does while another thread is between `waitpid` and its note of the code."""
        if popen.returncode is None and not popen.sentinel_is_open():
            asked.set()
        return popen.returncode

    def collect() -> None:
        os.waitpid(popen.pid, 0)
        assert asked.wait(30)
        popen.returncode = -9

    popen.sentinel_is_open = lambda: not multiprocessing.connection.wait([popen.sentinel], 0)
    popen.poll = poll
    collector = threading.Thread(target=collect)
    collector.start()
    workers = Workers(CancelledEngine(ranks))
    ranks[1].kill()
    collector.join(30)
    with pytest.raises(EngineDiedError, match="decoding: rank 1 of 2 ended with SIGKILL; RuntimeError: cancelled"):
        workers.step()
    workers.close()
    for rank in ranks:
        rank.join(30)
