"""Trials that cause a fault in a buffer under load, and check the result.

load     pushers push visits of several prompts, and repeat each push with the same ids until it is acknowledged;
         a doubler pushes the same rollouts at the same time in another order; one trainer draws and acks step by step
fault    one function, called at a random moment
after    the load continues for a moment and ends. `check` compares Redis, index, stats and ledger with the answers to
         the load: every acknowledged rollout exactly once (or evicted and counted), no batch half acked
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from redis import Redis

from tba.api import AckRequest, BatchRequest, VersionRequest
from tba.errors import BusyError, UnavailableError, VoidBatchError
from tba.wire import decode_rollout, encode_rollout
from tba_cli.reports.ledger import LedgerCheck, batch_entries, ledger_lines, lineage_tree
from tests.support.buffer import Stack, make_payloads, make_prompts, make_rollout, start_lineage
from tests.support.waits import until

NUM_PROMPTS = 6
NUM_PUSHERS = 3
MARK_EVERY = 3
NUM_TRIALS = int(os.environ.get("CHAOS_TRIALS", "1"))
RECOVERY_S = 180.0
MOST_THAT_FILL = 1000
"""A buffer with room for at most this many rollouts is filled before the fault."""
Fault = Callable[[Stack, random.Random], None]


class Pusher(threading.Thread):
    """Pushes without pause, and repeats each push until it is acknowledged; `shared` gets each for the doubler."""

    def __init__(self, stack: Stack, name: str, shared: list[list[bytes]], num_tokens: int) -> None:
        super().__init__(daemon=True, name=name)
        self._client = stack.buffer.client(retry_s=0)
        self._shared = shared
        self._num_tokens = num_tokens
        self._random = random.Random(name)
        self.acked: dict[bytes, bytes] = {}
        self.attempted: dict[bytes, bytes] = {}
        self.outcomes: Counter[str] = Counter()
        self.num_failures = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            payloads = self._next()
            items = {decode_rollout(payload).rollout_id: payload for payload in payloads}
            self.attempted.update(items)
            while not self.over.is_set():
                try:
                    reply = self._client.push(payloads)
                except (UnavailableError, BusyError):
                    self.num_failures += 1
                    self.over.wait(0.05)
                    continue
                self.outcomes.update(outcome.outcome for outcome in reply.outcomes)
                self.acked.update(items)
                break

    def _next(self) -> list[bytes]:
        prompts = [f"train-{self._random.randrange(NUM_PROMPTS)}" for _ in range(2)]
        payloads = make_payloads(prompts, per_prompt=4, searcher_id=self.name, num_tokens=self._num_tokens)
        payloads.append(encode_rollout(make_rollout(prompts[0], reward=None, searcher_id=self.name)))  # pending
        self._shared.append(payloads)
        return payloads


class Doubler(Pusher):
    """Pushes the newest pushes of the pushers again, in reverse order and often at the same time."""

    def _next(self) -> list[bytes]:
        while not self._shared and not self.over.is_set():
            time.sleep(0.001)
        picked = self._random.choice(self._shared[-3:]) if self._shared else []
        return picked[::-1] or make_payloads(["train-0"], per_prompt=1)


class Trainer(threading.Thread):
    """Draws and acks a batch per step, and announces a version every MARK_EVERY steps. It draws again after a void
    batch, and repeats a call that gets no answer."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True, name="trainer")
        self._client = stack.buffer.client(retry_s=0)
        self._lineage = start_lineage(self._client)
        self.acked: list[tuple[int, str]] = []
        self.unsure: tuple[int, str] | None = None
        self.num_void = 0
        self.error: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            step = 1
            while not self.over.is_set():
                if self._step(step):
                    step += 1
        except BaseException as error:  # shown by check()
            self.error = error

    def _step(self, step: int) -> bool:
        lineage = self._lineage
        batch = self._until_answered(
            lambda: self._client.draw_batch(
                BatchRequest(trainer_id="trainer", lineage=lineage.lineage, step=step, token=lineage.token, wait_s=0.2)
            )
        )
        if batch is None:
            return False
        num = len(batch.rollouts)
        request = AckRequest(lineage=lineage.lineage, step=step, token=lineage.token, policy_ages=[0] * num)
        self.unsure = (step, batch.batch_id)
        try:
            acked = self._until_answered(lambda: self._client.ack(batch.batch_id, request) or True)
        except VoidBatchError:
            self.num_void += 1
            self.unsure = None
            return False
        if acked:
            self.acked.append((step, batch.batch_id))
            self.unsure = None
            if step % MARK_EVERY == 0:
                mark = VersionRequest(version=f"{lineage.lineage}-{step}", token=lineage.token)
                self._until_answered(lambda: self._client.announce_version(mark))
        return bool(acked)

    def _until_answered(self, call: Callable[[], Any]) -> Any:
        while not self.over.is_set():
            try:
                return call()
            except (UnavailableError, BusyError):
                self.over.wait(0.02)
        return None


@dataclass
class Trial:
    """One trial: a stack, its load, a seed."""

    stack: Stack
    seed: int
    num_tokens: int = 3
    extra: dict[bytes, bytes] = field(default_factory=dict)
    """Rollouts that the fault itself pushes: id -> payload."""
    with_compaction: bool = False
    """Whether the load continues until the upkeep has compacted the log."""
    load: list[Pusher] = field(default_factory=list)
    trainer: Trainer = field(init=False)

    def run(self, fault: Fault, *, before_s: float = 0.6, after_s: float = 0.6) -> Counter[str]:
        """Start the load, cause the fault, continue and end the load; return the counts of `check`."""
        rng = random.Random(self.seed)
        client = self.stack.client
        client.upload_prompts(make_prompts(NUM_PROMPTS))
        self.trainer = Trainer(self.stack)
        shared: list[list[bytes]] = []
        for number in range(NUM_PUSHERS):
            self.load.append(Pusher(self.stack, f"pusher-{self.seed}-{number}", shared, self.num_tokens))
        self.load.append(Doubler(self.stack, f"doubler-{self.seed}", shared, self.num_tokens))
        for thread in (*self.load, self.trainer):
            thread.start()
        time.sleep(rng.uniform(0.2, before_s))
        most = self.stack.recipe.buffer.max_rollouts
        if most <= MOST_THAT_FILL:  # it is to evict when the fault comes, however slow this machine is
            until("it evicts", lambda: sum(len(pusher.acked) for pusher in self.load) > 1.25 * most)
        fault(self.stack, rng)
        self._until_it_continues()
        time.sleep(after_s)
        if self.with_compaction:
            until("the log is compacted", lambda: client.stats().checkpoint_position > 0)
        for thread in (*self.load, self.trainer):
            thread.over.set()
        for thread in (*self.load, self.trainer):
            thread.join(timeout=RECOVERY_S)
            assert not thread.is_alive(), f"{thread.name} hangs"
        return self.check()

    def _until_it_continues(self) -> None:
        deadline = time.monotonic() + RECOVERY_S
        before = sum(len(pusher.acked) for pusher in self.load)
        while sum(len(pusher.acked) for pusher in self.load) == before:
            assert time.monotonic() < deadline, "no push was acknowledged again after the fault"
            time.sleep(0.02)

    def check(self) -> Counter[str]:
        """Assert that nothing acknowledged is lost or stored twice; return counts of what happened."""
        if self.trainer.error is not None:
            raise self.trainer.error
        attempted = {rid: data for pusher in self.load for rid, data in pusher.attempted.items()}
        attempted.update(self.extra)
        acked = {rid for pusher in self.load for rid in pusher.acked} | self.extra.keys()
        with Redis.from_url(self.stack.redis.url) as redis:
            stored: dict[bytes, bytes] = redis.hgetall("tba:test:payloads")  # type: ignore[assignment]
        stats = self.stack.client.stats()
        num_evicted = sum(stats.evicted.values())
        index, checkpoint_position = asyncio.run(_index(self.stack))
        rows = index.live_rows()
        assert stored.items() <= attempted.items(), "something is stored that nobody pushed, or other bytes"
        assert sorted(index.rollout_ids(rows)) == sorted(stored), "index and payloads disagree"
        assert stats.num_rollouts == len(stored)
        assert stats.payload_bytes == sum(map(len, stored.values()))
        assert stats.rollouts_generated == stats.pushed["new"] == len(stored) + num_evicted
        assert stats.pushed["new"] <= len(attempted), "something was stored twice"
        missing = acked - stored.keys()
        assert len(missing) <= num_evicted, f"{len(missing)} acknowledged rollouts are gone, {num_evicted} were evicted"
        assert stats.num_rollouts <= self.stack.recipe.buffer.max_rollouts
        self._check_ledger(stats.rollouts_trained)
        return Counter(
            acked=len(acked),
            stored=len(stored),
            evicted=num_evicted,
            duplicates=sum(pusher.outcomes["duplicate"] for pusher in self.load),
            failed_pushes=sum(pusher.num_failures for pusher in self.load),
            steps=len(self.trainer.acked),
            void=self.trainer.num_void,
            pending=stats.num_pending,
            with_compaction=int(checkpoint_position > 0),
        )

    def _check_ledger(self, num_trained: int | None) -> None:
        client = self.stack.client
        info, lines = client.run(), list(ledger_lines(client))
        check = LedgerCheck(lineage_tree(info.parents), lineage=info.lineage, step=info.step)
        for line in lines:
            check.take(line)
        assert check.violations() == []
        entries = batch_entries(lines)
        batches = [(entry.step, entry.batch_id) for entry in entries]
        known = [*self.trainer.acked, *([self.trainer.unsure] if self.trainer.unsure else [])]
        assert batches in (self.trainer.acked, known), "the ledger is not what the trainer was told"
        assert num_trained == sum(entry.num_rollouts for entry in entries)


async def _index(stack: Stack) -> Any:
    """Return the index that a new process builds from Redis, and the log position of its checkpoint."""
    from tba_buffer.index.log_follower import read_head
    from tba_buffer.service import Buffer

    buffer = Buffer(stack.recipe, CollectorRegistry())
    try:
        return await buffer.view.catch_up(), (await read_head(buffer.context)).position
    finally:
        await buffer.context.redis.aclose()
