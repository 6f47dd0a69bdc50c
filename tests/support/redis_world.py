"""A Redis, a buffer on it, and the pushes that the buffer has acknowledged."""

from __future__ import annotations

from typing import Any

from tba.errors import UnavailableError
from tests.support.buffer import make_payloads, make_prompts, make_recipe, start_lineage
from tests.support.buffer_fixtures import BufferThread
from tests.support.buffer_reads import readyz
from tests.support.redis_process import RedisProcess
from tests.support.waits import until


class RedisWorld:
    """A buffer on the running `redis`, with `num_pushes` acknowledged pushes; `sections` override the recipe."""

    def __init__(self, redis: RedisProcess, *, num_pushes: int = 1, **sections: dict[str, Any]) -> None:
        self.redis = redis
        self.recipe = make_recipe(**{**sections, "buffer": {"redis_url": redis.url, **sections.get("buffer", {})}})
        self.buffers: list[BufferThread] = []
        self.start_buffer()
        self.client.upload_prompts(make_prompts(4))
        self.token = start_lineage(self.client).token
        self.acknowledged: list[bytes] = []
        self.push(num_pushes)

    @property
    def buffer(self) -> BufferThread:
        """The buffer that was started last."""
        return self.buffers[-1]

    def start_buffer(self) -> None:
        """Stop all buffers and start a new one on the same Redis."""
        for buffer in self.buffers:
            buffer.stop()
        self.buffers.append(BufferThread(self.recipe))
        self.client = self.buffer.client()

    def push(self, num: int = 1) -> None:
        """Push `num` times, and note the rollouts as acknowledged; an error is raised, without a retry."""
        for _ in range(num):
            payloads = make_payloads(["train-0"])
            assert {outcome.outcome for outcome in self.client.push(payloads).outcomes} == {"new"}
            self.acknowledged += payloads

    def why_refused(self) -> str | None:
        """Push once; return why the push is refused, or None if it is acknowledged."""
        try:
            self.push()
        except UnavailableError as error:
            return str(error)
        return None

    def refused(self, text: str) -> None:
        """Wait until pushes are refused with `text` in the reason, and `/readyz` fails with it too."""
        until(f"{text!r} is refused", lambda: text in (self.why_refused() or ""))
        until("not ready", lambda: readyz(self.buffer.url)[0] == 503)
        assert text in readyz(self.buffer.url)[1]["detail"]

    def accepted(self) -> None:
        """Wait until pushes are acknowledged, and the service is ready."""
        until("a push is accepted", lambda: self.why_refused() is None)
        until("ready", lambda: readyz(self.buffer.url)[0] == 200)

    def outcomes_again(self) -> set[str]:
        """Push all acknowledged rollouts once more; return the outcomes."""
        return {outcome.outcome for outcome in self.client.push(self.acknowledged).outcomes}

    def stop(self) -> None:
        for buffer in self.buffers:
            buffer.stop()
        self.redis.stop()
