"""kill -9 and SIGSTOP of the buffer process during pushes, samples and eviction."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tba.errors import UnavailableError
from tba.wire import decode_rollout
from tests.support.buffer import BufferProcess, Stack, make_payloads, start_buffer, write_recipe
from tests.support.chaos import RECOVERY_S, Trial
from tests.support.redis_process import free_port

Counts = list[Counter[str]]
Start = Callable[..., Stack]
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


@pytest.mark.nightly
def test_sigstop_of_the_buffer_while_it_evicts(start: Start, seed: int, count: Counts) -> None:
    stack = start(buffer=EVICTING)
    counts = Trial(stack, seed).run(freeze)
    assert counts["evicted"] > 0
    count.append(counts)


def test_kill_9_of_the_buffer_while_it_writes_bases(start: Start, seed: int, count: Counts) -> None:
    """The log is so short that the upkeep of every second writes a new base."""
    stack = start(buffer={**EVICTING, "max_log_events_since_checkpoint": 100})
    counts = Trial(stack, seed, with_compaction=True).run(kill, before_s=2.5)
    assert counts["evicted"] > 0
    assert counts["with_compaction"] > 0
    count.append(counts)


@pytest.mark.nightly
def test_a_frozen_owner_that_wakes_beside_its_successor(tmp_path: Path, start: Start, seed: int, count: Counts) -> None:
    """The owner is frozen under load, in the middle of evicting; a successor takes the run and evicts as well; the old
    owner wakes, is refused, and changes nothing of what is stored."""
    stack = start(buffer=EVICTING)
    second: list[BufferProcess] = []

    def fault(_: Stack, rng: random.Random) -> None:
        stack.buffer.process.send_signal(signal.SIGSTOP)
        second.append(start_second(stack, tmp_path))
        client = second[0].client()
        for _push in range(60):
            payloads = make_payloads(["train-0"], per_prompt=8)
            extra.update({decode_rollout(payload).rollout_id: payload for payload in payloads})
            client.push(payloads)
        stack.buffer.process.send_signal(signal.SIGCONT)
        _until_refused(stack)
        second[0].kill()
        stack.buffer.kill()
        stack.buffer.start()  # takes the run back

    extra: dict[bytes, bytes] = {}
    try:
        trial = Trial(stack, seed, extra=extra)
        counts = trial.run(fault)
        assert counts["evicted"] > 400
        count.append(counts)
    finally:
        for buffer in second:
            buffer.stop()


def start_second(stack: Stack, folder: Path) -> BufferProcess:
    """One more buffer process over the same Redis; it owns the run."""
    changed = stack.recipe.buffer.model_copy(update={"port": free_port(), "url": None})
    recipe = stack.recipe.model_copy(update={"buffer": changed})
    return start_buffer(write_recipe(folder / "second.json", recipe))


def _until_refused(stack: Stack) -> None:
    deadline = time.monotonic() + RECOVERY_S
    client = stack.buffer.client(retry_s=0)
    while True:
        try:
            client.push(make_payloads(["train-0"], per_prompt=1, run="of-nobody"))  # nothing that would be stored
        except UnavailableError as error:
            if "newer buffer process" in str(error):
                return
        assert time.monotonic() < deadline, "the old owner still serves"
        time.sleep(0.05)
