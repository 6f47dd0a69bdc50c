"""The index alone, in a process of its own: draws of 512 and memory."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from tba_buffer.index.log import CHECKPOINT_DTYPE, LogCheckpoint, Publication
from tba_buffer.index.rollout_index import Index, IndexSettings
from tba_buffer.sampling.mop import draw_slots

from benchmarks.buffer_bench.crowd import SPAWN
from benchmarks.buffer_bench.world import SAMPLING, rss_bytes
from tba.versions import START
from tests.support.buffer import make_recipe

REPEATS = 101


def index_alone(num_rollouts: int = 1_000_000) -> dict[str, float]:
    """Median time of a draw of 512 in groups (64 slots of 8, and one prompt with everything), and memory."""
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
        many = pool.submit(_measure, num_rollouts, num_rollouts // 16).result()
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
        one = pool.submit(_measure, num_rollouts, 1).result()
    return {
        "draw_groups_ms": many["groups_ms"],
        "draw_one_prompt_ms": one["groups_ms"],
        "bytes_per_rollout": max(many["bytes_per_rollout"], one["bytes_per_rollout"]),
        "restore_s": many["restore_s"],
    }


def _measure(num_rollouts: int, num_prompts: int) -> dict[str, float]:
    num_slots = min(64, num_prompts)
    sampling = {**SAMPLING, "prompts_per_batch": num_slots, "group_size": 512 // num_slots}
    recipe = make_recipe(sampling=sampling)
    index = Index(IndexSettings.of(recipe))
    gc.collect()
    before = rss_bytes(os.getpid())
    records = _records(num_rollouts, num_prompts)
    publications = (Publication(num_rollouts - 10_000, START), Publication(num_rollouts - 5_000, START))
    began_s = time.perf_counter()
    index.restore(LogCheckpoint(num_rollouts, publications, records))
    restore_s = time.perf_counter() - began_s
    groups_ms = _median_ms(lambda seed: draw_slots(index, recipe.sampling, seed))
    del records
    gc.collect()
    return {
        "groups_ms": groups_ms,
        "bytes_per_rollout": (rss_bytes(os.getpid()) - before) / num_rollouts,
        "restore_s": restore_s,
    }


def _records(num_rollouts: int, num_prompts: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    records = np.zeros(num_rollouts, dtype=CHECKPOINT_DTYPE)
    records["position"] = np.arange(num_rollouts)
    records["rollout_id"] = np.frombuffer(rng.bytes(16 * num_rollouts), dtype="V16")
    records["reward"] = rng.random(num_rollouts)
    records["prompt"] = rng.permutation(np.arange(num_rollouts) % num_prompts)
    records["num_bytes"], records["num_tokens"] = 4096, 450
    return records


def _median_ms(draw: Callable[[int], object]) -> float:
    times = []
    draw(0)
    for seed in range(REPEATS):
        began_s = time.perf_counter()
        draw(seed)
        times.append(time.perf_counter() - began_s)
    return 1000 * statistics.median(times)
