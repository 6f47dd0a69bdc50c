"""Kind `http`: any endpoint that takes the batches of `POST /v1/score` and answers as it does.

    request  {"items": [{"item_id": "0", "task": "score", "prompt": "...", "response": "...", "data": {...},
                         "finish_reason": "stop"}, ...]}
    reply    {"results": [{"item_id": "0", "reward": 0.5},
                          {"item_id": "1", "error": {"reason": "...", "detail": "..."}}, ...]}

A request is repeated where that can help: no connection, 429, 5xx (an endpoint must allow it: scoring changes nothing).
A batch that is refused as a whole (400, 413, 422) is halved until the item it is refused for stands alone.
The deadline of an item runs from when its first request may go out.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from urllib3.util import parse_url

from tba.config.reward import HttpSpec
from tba.errors import ConfigError
from tba_reward.http_calls import EndpointCalls
from tba_reward.scorers.base import Failure, Item, Outcome, Scorer, Tools, version_of
from tba_reward.scorers.example import OK

IMPLEMENTATION = 1
GRACE_S = 0.5
"""What a thread gets beyond the deadline to say so itself. It cannot where the address is looked up for long, or an
endpoint sends its answer drop by drop: a socket's timeout begins anew with every byte."""


def build(spec: HttpSpec, tools: Tools) -> Scorer:
    """The scorer; nothing is sent before the first item.

    Raises:
        ConfigError: the environment variable with the token is not set.
    """
    token = None if spec.token_env is None else os.environ.get(spec.token_env)
    if spec.token_env is not None and not token:
        raise ConfigError(
            f"reward kind 'http': the environment variable {spec.token_env} is not set; put the token for "
            f"{spec.url} there"
        )
    calls = EndpointCalls(
        spec.url,
        task=spec.task or "score",
        token=token,
        num_retries=spec.num_retries,
        max_connections=spec.max_concurrent,
    )
    return HttpScorer(
        calls,
        timeout_s=tools.timeout_s(spec),
        max_batch_items=spec.max_batch_items,
        max_concurrent=spec.max_concurrent,
        version=version_of(spec, IMPLEMENTATION),
    )


class HttpScorer:
    """Sends batches from a few threads; each waits no longer than the deadline of its items.

    Args:
        calls: how the endpoint is asked.
        timeout_s: deadline of one item.
        max_batch_items: most items in one request.
        max_concurrent: most requests at once.
        version: see `version_of`.
    """

    def __init__(
        self, calls: EndpointCalls, *, timeout_s: float, max_batch_items: int, max_concurrent: int, version: str
    ) -> None:
        self._calls, self._timeout_s, self._max_batch_items = calls, timeout_s, max_batch_items
        self._version = version
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="http-scorer")
        self._turn = asyncio.Semaphore(max_concurrent)
        self._health = "the endpoint was not reached yet"

    @property
    def version(self) -> str:
        """Digest of the settings; the endpoint's own changes are told by `revision`."""
        return self._version

    async def start(self) -> None:
        """Open and close a connection to see whether somebody listens."""
        url = parse_url(self._calls.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            async with asyncio.timeout(self._timeout_s):
                _, writer = await asyncio.open_connection((url.host or "").strip("[]"), port)
        except (TimeoutError, OSError, socket.gaierror) as error:
            self._health = f"no connection to {url.host}:{port} ({type(error).__name__}: {error})"
            return
        writer.close()
        self._health = OK

    async def close(self) -> None:
        """End the threads; one that waits for the endpoint ends by its deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._calls.close()

    def health(self) -> str:
        """Whether the endpoint answered the last time."""
        return self._health

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item, in order."""
        size = self._max_batch_items
        batches = [items[at : at + size] for at in range(0, len(items), size)]
        answers = await asyncio.gather(*(self._score_batch(batch) for batch in batches))
        return [outcome for answer in answers for outcome in answer]

    async def _score_batch(self, items: Sequence[Item]) -> list[Outcome]:
        async with self._turn:
            loop = asyncio.get_running_loop()
            call = loop.run_in_executor(self._threads, self._calls.score, items, self._timeout_s)
            outcomes: list[Outcome]
            try:
                async with asyncio.timeout(self._timeout_s + GRACE_S):
                    outcomes = await call
            except TimeoutError:
                late = Failure("unreachable", f"{self._calls.url} did not finish its answer before the deadline")
                outcomes = [late] * len(items)
        away = [each for each in outcomes if isinstance(each, Failure) and each.reason == "unreachable"]
        if len(away) < len(outcomes):
            self._health = OK
        elif away:
            self._health = f"the endpoint failed the last time ({away[0].detail})"
        return outcomes
