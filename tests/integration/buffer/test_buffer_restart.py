"""kill -9 of the buffer and of Redis: nothing acknowledged is lost, nothing is there twice, the index is the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis import Redis as Client
from tba_buffer.index.log import parse_entry
from tba_buffer.sampling.mop import draw_slots
from tba_buffer.service import Buffer

from tba.api import AckRequest, Stats
from tba.clients.service_client import ServiceClient
from tba.errors import UnavailableError
from tba.wire import Rollout, decode_rollout, encode_rollout
from tests.support.buffer import (
    ROOT,
    SERVICE_PATHS,
    Stack,
    begin_run,
    make_payloads,
    make_prompts,
    make_recipe,
    write_recipe,
)
from tests.support.index_values import fingerprint
from tests.support.leases import draw, fulfil, lease
from tests.support.redis_process import start_redis
from tests.support.waits import DEADLINE_S, until


def fingerprint_of_redis(stack: Stack) -> tuple[object, ...]:
    """Return the state of an index built from Redis alone; its buffer is not started and owns nothing."""

    async def build() -> tuple[object, ...]:
        buffer = Buffer(stack.recipe, CollectorRegistry())
        try:
            return fingerprint(await buffer.view.catch_up())
        finally:
            await buffer.stop()

    return asyncio.run(build())


def counts(stats: Stats) -> dict[str, Any]:
    """Return the stats without the parts that belong to one process."""
    return stats.model_dump(exclude={"epoch", "rates", "index_bytes"})


def stored(stack: Stack) -> dict[bytes, bytes]:
    with Client.from_url(stack.redis.url) as client:
        replies: Any = client.hgetall("tba:test:payloads")
        return replies


class Pusher(threading.Thread):
    """Pushes without pause and notes what was acknowledged; a failed push is pushed again, as searchers do."""

    def __init__(self, stack: Stack, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self._client = stack.buffer.client(retry_s=0)
        self.acked: list[Rollout] = []
        self.num_failures = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            payloads = make_payloads(["train-0", "train-1"], per_prompt=4, searcher_id=self.name)
            while True:
                try:
                    reply = self._client.push(payloads)
                except UnavailableError:
                    self.num_failures += 1
                    if self.over.wait(0.05):
                        return
                    continue
                assert {outcome.outcome for outcome in reply.outcomes} <= {"new", "duplicate"}
                self.acked += map(decode_rollout, payloads)
                break


@pytest.mark.parametrize("victim", ["buffer", "redis"])
def test_a_kill_loses_nothing_acknowledged_and_stores_nothing_twice(stack: Stack, victim: str) -> None:
    client = stack.client
    client.upload_prompts(make_prompts(2))
    pushers = [Pusher(stack, f"pusher-{i}") for i in range(3)]
    for pusher in pushers:
        pusher.start()
    process = stack.buffer if victim == "buffer" else stack.redis

    def pushed_more() -> None:
        num = sum(len(pusher.acked) for pusher in pushers)
        until("pushes are acknowledged", lambda: sum(len(pusher.acked) for pusher in pushers) >= num + 48)

    for _ in range(3):
        pushed_more()
        num_failures = sum(pusher.num_failures for pusher in pushers)
        process.kill()
        until("pushes fail", lambda before=num_failures: sum(pusher.num_failures for pusher in pushers) > before)
        process.start()
    pushed_more()
    for pusher in pushers:
        pusher.over.set()
    for pusher in pushers:
        pusher.join(timeout=DEADLINE_S)
        assert not pusher.is_alive()
    acked = {rollout.rollout_id: encode_rollout(rollout) for pusher in pushers for rollout in pusher.acked}
    assert len(acked) >= 4 * 48
    here = stored(stack)
    assert {rollout_id: here.get(rollout_id) for rollout_id in acked} == acked
    stats = client.stats()
    assert stats.num_rollouts == stats.num_scored == stats.pushed["new"] == len(here)
    assert (stats.log_position, stats.payload_bytes) == (len(here), sum(map(len, here.values())))


def test_a_restarted_buffer_continues_exactly_where_it_was(stack: Stack) -> None:
    client = stack.client
    lineage = begin_run(client, 8, 2)
    leases = lease(client, 3).leases
    client.push(make_payloads([f"train-{i}" for i in range(8)]))
    batch = draw(client, lineage)
    before, index = counts(client.stats()), fingerprint_of_redis(stack)
    stack.buffer.kill()
    stack.buffer.start()
    assert counts(client.stats()) == before
    assert fingerprint_of_redis(stack) == index
    again = draw(client, lineage)
    assert (again.batch_id, again.seed) == (batch.batch_id, batch.seed)
    assert [r.rollout_id for r in again.rollouts] == [r.rollout_id for r in batch.rollouts]
    client.ack(batch.batch_id, AckRequest(lineage=lineage.lineage, step=1, token=lineage.token, policy_ages=[0] * 16))
    fulfil(client, leases[0], 1)
    more = lease(client, 5).leases
    assert len({item.prompt.prompt_id for item in leases + more}) == 8
    stats = client.stats()
    assert (stats.rollouts_trained, stats.num_rollouts, stats.leases["open"]) == (16, 33, 8)


def test_a_batch_can_be_drawn_again_from_its_seed_and_log_position(stack: Stack) -> None:
    client = stack.client
    lineage = begin_run(client, 8, per_prompt=9)
    batch = draw(client, lineage)
    client.push(make_payloads([f"train-{i}" for i in range(8)]))

    async def redraw() -> list[bytes]:
        buffer = Buffer(stack.recipe, CollectorRegistry())
        try:
            index = buffer.view.index
            for entry_id, fields in await buffer.context.redis.xrange(buffer.context.keys.log):
                if index.position < batch.log_position:
                    index.apply(parse_entry(entry_id, fields))
            slots = draw_slots(index, stack.recipe.sampling, batch.seed)
            return [rollout_id for slot in slots for rollout_id in index.rollout_ids(slot.rows)]
        finally:
            await buffer.stop()

    assert asyncio.run(redraw()) == [rollout.rollout_id for rollout in batch.rollouts]


def test_a_start_over_a_damaged_prompt_is_refused_with_its_key_and_changes_nothing(stack: Stack) -> None:
    begin_run(stack.client, 2)
    stack.client.push(make_payloads(["train-0", "train-1"]))
    before = fingerprint_of_redis(stack)
    stack.buffer.kill()
    with Client.from_url(stack.redis.url) as admin:
        whole = admin.hget("tba:test:prompts", "train-1")
        for damage in (b"\xff", None):
            admin.hdel("tba:test:prompts", "train-1")
            if damage is not None:
                admin.hset("tba:test:prompts", "train-1", damage)
            ended = run_service(stack.buffer.recipe_path)
            assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
            last = ended.stderr.splitlines()[-1]
            assert last.startswith("error: buffer: the field train-1 of tba:test:prompts in Redis cannot be read (")
            assert last.endswith("restore Redis from a copy")
        admin.hset("tba:test:prompts", "train-1", whole)  # pyright: ignore[reportArgumentType]
    stack.buffer.start()
    assert fingerprint_of_redis(stack) == before
    assert {item.prompt.prompt_id for item in lease(stack.client, 2).leases} == {"train-0", "train-1"}


def test_the_buffer_refuses_to_start_over_a_redis_that_could_lose_data(tmp_path: Path) -> None:
    redis = start_redis(tmp_path / "redis", options=("--appendonly", "no"))
    try:
        recipe = make_recipe(buffer={"port": 0, "redis_url": redis.url})
        ended = run_service(write_recipe(tmp_path / "recipe.json", recipe))
    finally:
        redis.stop()
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "appendonly no" in ended.stderr
    assert ended.stderr.startswith("error: buffer: ")


def test_a_buffer_waits_for_a_redis_that_is_late(stack: Stack) -> None:
    stack.client.upload_prompts(make_prompts(1))
    stack.client.push(make_payloads(["train-0"]))
    stack.buffer.kill()
    stack.redis.kill()
    starting = threading.Thread(target=stack.buffer.start)  # returns when the same process is ready
    starting.start()
    try:
        client = ServiceClient(stack.buffer.url, retry_s=0)
        problem = until("it answers", lambda: readiness_problem(client))
        assert re.search(r"starting: Redis at redis://127.0.0.1:\d+/0: it cannot be reached", str(problem))
        with urllib.request.urlopen(f"{stack.buffer.url}/livez", timeout=DEADLINE_S) as reply:
            assert json.load(reply) == {"status": "ok"}
        with pytest.raises(UnavailableError, match="cannot be reached"):  # which clients try again
            stack.buffer.client(retry_s=0).stats()
        assert "redis-start" in stack.buffer.log_path.read_text()
    finally:
        stack.redis.start()
        starting.join(DEADLINE_S)
    assert stack.client.stats().num_rollouts == 4


def readiness_problem(client: ServiceClient) -> Exception | None:
    with contextlib.suppress(UnavailableError):  # the process does not listen yet
        return client.not_ready()
    return None


def test_sigterm_ends_a_buffer_that_waits_for_redis(stack: Stack) -> None:
    stack.buffer.kill()
    stack.redis.kill()

    def start() -> None:
        with pytest.raises(RuntimeError, match="SIGTERM while it starts"):
            stack.buffer.start()

    starting = threading.Thread(target=start)
    starting.start()
    client = ServiceClient(stack.buffer.url, retry_s=0)
    until("it waits", lambda: readiness_problem(client))
    stack.buffer.process.send_signal(signal.SIGTERM)
    assert stack.buffer.process.wait(timeout=DEADLINE_S) == 0
    starting.join(DEADLINE_S)


def test_the_buffer_refuses_an_open_address_without_tokens_and_a_port_in_use(stack: Stack, tmp_path: Path) -> None:
    redis_url = stack.redis.url
    for changes, sentence in (
        ({"host": "0.0.0.0", "port": 0}, "without tokens"),
        ({"port": stack.recipe.buffer.port}, "in use"),
    ):
        recipe = make_recipe(buffer={"redis_url": redis_url, **changes})
        ended = run_service(write_recipe(tmp_path / "other.json", recipe))
        assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
        assert sentence in ended.stderr


def test_sigterm_ends_the_buffer_cleanly(stack: Stack) -> None:
    stack.buffer.process.send_signal(signal.SIGTERM)
    assert stack.buffer.process.wait(timeout=60) in (0, -signal.SIGTERM)
    assert "Traceback" not in stack.buffer.log_path.read_text()


def run_service(recipe_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tba_buffer", "--config", str(recipe_path)],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(map(str, SERVICE_PATHS)), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
