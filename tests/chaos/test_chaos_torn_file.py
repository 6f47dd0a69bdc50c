"""Redis ended at a random byte of a write, again and again: its file ends in half a transaction nearly every time.

A limit on the size of its file ends it there, as a full disk does, and as a kill in the middle of a write may.
"""

from __future__ import annotations

import random
import resource
from collections import Counter
from pathlib import Path

import pytest

from tba.clients import BufferClient
from tba.errors import UnavailableError
from tests.support.buffer import make_payloads, make_prompts, make_recipe, start_lineage
from tests.support.buffer_fixtures import BufferThread
from tests.support.redis_process import RedisProcess, start_redis
from tests.support.waits import until

NUM_ENDS = 4
MOST_BYTES = 12_000
"""A push is up to about this long, so the limit falls into any part of one, and at times into the next."""


class Pusher:
    """Pushes of one to eight rollouts, and those that were acknowledged."""

    def __init__(self, client: BufferClient, rng: random.Random) -> None:
        self._client, self._rng = client, rng
        self.acked: list[bytes] = []

    def push(self) -> bool:
        """Push rollouts; return True if they were acknowledged. After False they may be stored or not."""
        payloads = make_payloads(["train-0"], per_prompt=self._rng.randint(1, 8))
        try:
            self._client.push(payloads)
        except UnavailableError:
            return False
        self.acked.extend(payloads)
        return True

    def outcomes(self, client: BufferClient) -> Counter[str]:
        """Push all acknowledged rollouts once more; count the outcomes that a buffer gives them."""
        chunks = [self.acked[begin : begin + 100] for begin in range(0, len(self.acked), 100)]
        return Counter(item.outcome for chunk in chunks for item in client.push(chunk).outcomes)


def end_within_a_write(redis: RedisProcess, pusher: Pusher, rng: random.Random) -> None:
    *_, last = sorted(redis.folder.glob("**/*.aof"), key=lambda path: path.stat().st_mtime_ns)
    size_bytes = last.stat().st_size
    _, hard = resource.prlimit(redis.process.pid, resource.RLIMIT_FSIZE)
    limit_bytes = size_bytes + rng.randint(1, MOST_BYTES)
    resource.prlimit(redis.process.pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))
    until("Redis has ended", lambda: not pusher.push() and redis.process.poll() is not None)


@pytest.mark.nightly
def test_redis_is_ended_within_a_write(tmp_path: Path, seed: int, count: list[Counter[str]]) -> None:
    rng = random.Random(seed)
    redis = start_redis(tmp_path / "redis")
    buffers = [BufferThread(make_recipe(buffer={"redis_url": redis.url}))]
    try:
        client = buffers[0].client()
        client.upload_prompts(make_prompts(4))
        start_lineage(client)
        pusher = Pusher(client, rng)
        for _ in range(NUM_ENDS):
            end_within_a_write(redis, pusher, rng)
            redis.start()
            until("a push is acknowledged", pusher.push)
        buffers.pop().stop()
        redis.kill()
        redis.start()  # only now is a half that was left in the file joined with what stands behind it
        buffers.append(BufferThread(make_recipe(buffer={"redis_url": redis.url})))
        again = buffers[0].client()
        outcomes = pusher.outcomes(again)
        num_stored = again.stats().num_rollouts
    finally:
        for buffer in buffers:
            buffer.stop()
        redis.stop()
    assert outcomes == {"duplicate": len(pusher.acked)}
    cut = (redis.folder / "redis.log").read_text().count("cut off its last")
    assert cut > 0
    count.append(Counter(ends=NUM_ENDS, cut_off=cut, acked=len(pusher.acked), stored=num_stored))
