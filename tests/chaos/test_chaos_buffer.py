"""kill -9 and SIGSTOP of the buffer process during pushes, samples and eviction."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.support.buffer import Stack, start_stack
from tests.support.chaos import Trial

Counts = list[Counter[str]]
EVICTING = {"max_rollouts": 200}


def kill(stack: Stack, rng: random.Random) -> None:
    """Up to three times in a row, also while it starts."""
    for _ in range(rng.randint(1, 3)):
        stack.buffer.kill()
        time.sleep(rng.uniform(0, 0.3))
        stack.buffer.start()
        time.sleep(rng.uniform(0, 0.3))


def freeze(stack: Stack, rng: random.Random) -> None:
    stack.buffer.process.send_signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 3))
    stack.buffer.process.send_signal(signal.SIGCONT)


def test_kill_9_of_the_buffer(tmp_path: Path, seed: int, count: Counts) -> None:
    stack = start_stack(tmp_path)
    try:
        count.append(Trial(stack, seed).run(kill))
    finally:
        stack.stop()


def test_kill_9_of_the_buffer_while_it_evicts(tmp_path: Path, seed: int, count: Counts) -> None:
    stack = start_stack(tmp_path, buffer=EVICTING)
    try:
        counts = Trial(stack, seed).run(kill)
        assert counts["evicted"] > 0
        count.append(counts)
    finally:
        stack.stop()


def test_sigstop_of_the_buffer_while_it_evicts(tmp_path: Path, seed: int, count: Counts) -> None:
    stack = start_stack(tmp_path, buffer=EVICTING)
    try:
        count.append(Trial(stack, seed).run(freeze))
    finally:
        stack.stop()


def test_a_frozen_buffer_that_wakes_beside_its_successor(tmp_path: Path, seed: int, count: Counts) -> None:
    """The port is the successor's only once the old one is gone, so the old one is thawed under another port."""
    stack = start_stack(tmp_path, buffer=EVICTING)
    second = start_stack_over(stack, tmp_path)
    try:

        def fault(_: Stack, rng: random.Random) -> None:
            second.buffer.process.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.1, 0.5))
            stack.buffer.kill()
            stack.buffer.start()  # takes the run over
            second.buffer.process.send_signal(signal.SIGCONT)
            time.sleep(1.5)  # long enough for upkeep of the old one, which must not evict any more

        count.append(Trial(stack, seed).run(fault))
    finally:
        second.buffer.stop()
        stack.stop()


def start_stack_over(stack: Stack, folder: Path) -> Stack:
    """One more buffer process over the same Redis."""
    from tests.support.buffer import start_buffer, write_recipe
    from tests.support.redis_process import free_port

    changed = stack.recipe.buffer.model_copy(update={"port": free_port(), "url": None})
    recipe = stack.recipe.model_copy(update={"buffer": changed})
    buffer = start_buffer(write_recipe(folder / "second.json", recipe))
    stack.buffer.kill()  # the second has taken the run; the first starts again and takes it back
    stack.buffer.start()
    return Stack(redis=stack.redis, buffer=buffer, recipe=recipe)
