"""A real Redis (AOF always) and a real buffer process for the benchmarks, filled as asked."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from benchmarks.buffer_bench.direct import direct_push
from benchmarks.buffer_bench.work import Work
from tests.support.buffer import Stack, make_prompts, start_stack
from tests.support.redis_process import DURABLE

SAMPLING = {
    "prompts_per_batch": 8,
    "group_size": 8,
    "rollouts_per_visit": 8,
    "min_size_to_sample": 64,
    "most_on_policy_prob": 0.5,
    "reward_inverse_temperature": 2.0,
    "uniform_share": 0.1,
}


REDIS_OPTIONS = (*DURABLE, "--auto-aof-rewrite-min-size", "1gb", "--rdbcompression", "no")
"""As `tba run`, Compose and the chart start Redis."""
PUSHES_PER_WORK = 16
"""Each `Work` visits its own prompts once: 16 pushes of 8 prompts."""


@contextmanager
def world(*, num_prompts: int, sampling: dict[str, Any] | None = None, **buffer: Any) -> Iterator[Stack]:
    """A stack with prompts uploaded; its folder is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tba-bench-"))
    stack = start_stack(
        folder,
        redis_options=REDIS_OPTIONS,
        sampling={**SAMPLING, **(sampling or {})},
        buffer={"max_rollouts": 20_000_000, "max_bytes": 1 << 40, **buffer},
    )
    try:
        prompts, client = make_prompts(num_prompts), stack.client
        for at in range(0, num_prompts, 10_000):
            client.upload_prompts(prompts[at : at + 10_000])
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


def fill(stack: Stack, num_rollouts: int, *, num_bytes: int, num_prompts: int) -> float:
    """Store rollouts through the same Lua script, without HTTP; answers the seconds it took."""
    began_s = time.perf_counter()
    with Redis.from_url(stack.redis.url) as redis:
        push = direct_push(redis, stack.recipe.run.name)
        for number in range(-(-num_rollouts // 64)):
            if number % PUSHES_PER_WORK == 0:
                work = Work(num_bytes=num_bytes, num_prompts=num_prompts, seed=number)
            push(work.push())
    return time.perf_counter() - began_s


def cpu_s(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
