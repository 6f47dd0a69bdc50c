"""Kind `http`: any endpoint with the request and reply of `POST /v1/score`.

    request  {"items": [{"item_id": "0", "task": "score", "prompt": "...", "response": "...", "data": {...},
                         "finish_reason": "stop"}, ...]}
    reply    {"results": [{"item_id": "0", "reward": 0.5},
                          {"item_id": "1", "error": {"reason": "...", "detail": "..."}}, ...]}

A request is repeated after a failed connection, 429 or 5xx, so an endpoint must allow that scoring is repeated.
A batch that is refused as a whole (400, 413, 422) is halved until the item to blame stands alone.
The deadline of an item begins when its batch gets one of the MAX_CONCURRENT threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_args

import urllib3
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.util import parse_url

from tba.api.scores import ScoreReason
from tba.config.reward import HttpSpec
from tba.errors import ConfigError
from tba.tls import without_secrets
from tba_reward.scorer import OK, Failure, Item, Outcome, checked, version_of
from tba_reward.scorers import Tools

MAX_BATCH_ITEMS, MAX_CONCURRENT = 64, 4
"""Most items in one request; most requests at once, each with a thread that waits for it."""
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_DETAIL_CHARS = 300
NUM_RETRIES, FIRST_PAUSE_S = 2, 0.1
_REFUSED_AS_A_WHOLE = (400, 413, 422)
_CHUNK_BYTES = 1 << 16
_REASONS: dict[str, ScoreReason] = {reason: reason for reason in get_args(ScoreReason)}
IMPLEMENTATION = 1
GRACE_S = 0.5
"""Seconds beyond the deadline in which a thread may report its own failure; then the batch fails without it. A slow DNS
lookup takes longer, and so may an answer that comes byte by byte: a socket's timeout begins again with every byte."""


def build(spec: HttpSpec, tools: Tools) -> HttpScorer:
    """Return the scorer; it sends no request before the first item."""
    token = None if spec.token_env is None else os.environ.get(spec.token_env)
    if spec.token_env is not None and not token:
        raise ConfigError(
            f"reward kind 'http': the environment variable {spec.token_env} is not set; put the token for "
            f"{without_secrets(spec.url)} there"
        )
    return HttpScorer(spec, token)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    retry_after_s: float
    body: bytes


class HttpScorer:
    """Sends batches of items to an endpoint from MAX_CONCURRENT threads.

    A batch ends by the deadline of its items. Every item gets an outcome: a bad reply becomes a Failure.
    """

    def __init__(self, spec: HttpSpec, token: str | None) -> None:
        # a query of the URL stands for changes of the endpoint itself
        self._spec, self.version = spec, version_of(spec, IMPLEMENTATION)
        self._url = without_secrets(spec.url)
        """The URL without secrets, for messages: failures are stored, exported and shown."""
        self._target = parse_url(spec.url).request_uri
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._http = urllib3.connection_from_url(spec.url, maxsize=MAX_CONCURRENT, retries=False)
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="http-scorer")
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._health = "the endpoint was not reached yet"

    async def start(self) -> None:
        """Open and close a connection to see whether the endpoint listens; `health` says the result."""
        url = parse_url(self._url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                _, writer = await asyncio.open_connection((url.host or "").strip("[]"), port)
        except (TimeoutError, OSError, socket.gaierror) as error:
            self._health = f"no connection to {url.host}:{port} ({type(error).__name__}: {error})"
            return
        writer.close()
        self._health = OK

    async def close(self) -> None:
        """End the threads without waiting; a thread that waits for the endpoint ends by its deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def health(self) -> str:
        """Return `ok` if the endpoint answered the last time, else what went wrong."""
        return self._health

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order."""
        size = MAX_BATCH_ITEMS
        batches = [items[at : at + size] for at in range(0, len(items), size)]
        answers = await asyncio.gather(*(self._score_batch(batch) for batch in batches))
        return [outcome for answer in answers for outcome in answer]

    async def _score_batch(self, items: Sequence[Item]) -> list[Outcome]:
        async with self._slots:
            loop, timeout_s = asyncio.get_running_loop(), self._spec.timeout_s
            outcomes: list[Outcome]
            try:
                async with asyncio.timeout(timeout_s + GRACE_S):
                    outcomes = await loop.run_in_executor(self._threads, self._ask, items, time.monotonic() + timeout_s)
                # what an endpoint says of a request may repeat its address
                if query := self._target.partition("?")[2]:
                    outcomes = [
                        Failure(each.reason, each.detail.replace(query, "...")) if isinstance(each, Failure) else each
                        for each in outcomes
                    ]
            except TimeoutError:
                late = Failure("unreachable", f"{self._url} did not finish its answer before the deadline")
                outcomes = [late] * len(items)
        # one item that the endpoint has answered shows that it is there
        away = [each for each in outcomes if isinstance(each, Failure) and each.reason == "unreachable"]
        if len(away) < len(outcomes):
            self._health = OK
        elif away:
            self._health = f"the endpoint failed the last time ({away[0].detail})"
        return outcomes

    # -- in a thread ------------------------------------------------------------------------------------------------

    def _ask(self, items: Sequence[Item], deadline_s: float) -> list[Outcome]:
        """Return one outcome per item, in order, by the deadline."""
        entries = [
            {
                "item_id": str(number),
                "task": self._spec.task or "score",
                "prompt": item.prompt,
                "response": item.response,
                "data": dict(item.data),
                "finish_reason": item.finish_reason,
            }
            for number, item in enumerate(items)
        ]
        answer = self._send(json.dumps({"items": entries}).encode(), deadline_s)
        if isinstance(answer, Failure):
            return [answer] * len(items)
        # one bad item may be the reason: it must not fail the others
        if answer.status in _REFUSED_AS_A_WHOLE and len(items) > 1:
            half = len(items) // 2
            return self._ask(items[:half], deadline_s) + self._ask(items[half:], deadline_s)
        if answer.status in _REFUSED_AS_A_WHOLE:
            return [Failure("malformed", f"the endpoint refuses the item: {_describe(answer)}")]
        if answer.status != 200:
            return [Failure("exception", f"{self._url}: {_describe(answer)}")] * len(items)
        try:
            # An error in the result of one item fails that item alone: NaN, which strict JSON does not know, passes, a
            # huge integer becomes infinite, and bytes that are no text are replaced.
            reply = json.loads(answer.body.decode("utf-8", "replace"), parse_int=float)
            if not isinstance(reply, dict) or not isinstance(reply.get("results"), list):
                raise ValueError('it must be an object {"results": [...]}')
        except (ValueError, RecursionError) as error:
            return [Failure("exception", f"the endpoint's answer is not a score reply: {error}")] * len(items)
        results = [each for each in reply["results"] if isinstance(each, dict)]
        by_id = {each["item_id"]: each for each in results if isinstance(each.get("item_id"), str)}
        return [_outcome(by_id.get(str(number))) for number in range(len(items))]

    def _send(self, body: bytes, deadline_s: float) -> _Answer | Failure:
        """Post a body; retry after a failed connection, 429 or 5xx, up to NUM_RETRIES times and until the deadline."""
        failure = Failure("unreachable", f"{self._url} was not asked before the deadline")
        for attempt in range(NUM_RETRIES + 1):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return failure
            pause_s = FIRST_PAUSE_S * 2**attempt * (0.5 + random.random() / 2)
            try:
                answer = self._post(body, deadline_s)
            # the deadline is over
            except (ReadTimeoutError, TimeoutError):
                return Failure("unreachable", f"no answer from {self._url} before the deadline")
            except (HTTPError, OSError) as error:
                failure = Failure("unreachable", f"{self._url}: {type(error).__name__}: {error}"[:MAX_DETAIL_CHARS])
            else:
                # any other answer would be the same the next time
                if answer.status != 429 and answer.status < 500:
                    return answer
                failure = Failure("unreachable", f"{self._url}: {_describe(answer)}")
                pause_s = max(pause_s, answer.retry_after_s)
            if attempt == NUM_RETRIES or time.monotonic() + pause_s >= deadline_s:
                return failure
            time.sleep(pause_s)
        return failure

    def _post(self, body: bytes, deadline_s: float) -> _Answer:
        left_s = max(deadline_s - time.monotonic(), 0.001)
        response = self._http.urlopen(
            "POST",
            self._target,
            body=body,
            headers=self._headers,
            timeout=urllib3.Timeout(total=left_s),
            redirect=False,
            preload_content=False,
        )
        content = bytearray()
        try:
            # in chunks, so that an endless answer ends at the size or the deadline
            while chunk := response.read1(_CHUNK_BYTES):
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise HTTPError(f"the answer is larger than {MAX_REPLY_BYTES} bytes")
                if time.monotonic() > deadline_s:
                    raise TimeoutError
        except BaseException:
            response.close()
            raise
        response.release_conn()
        try:
            retry_after_s = max(float(response.headers.get("retry-after") or 0), 0.0)
        except ValueError:  # a date: it is rare, and the usual pause is good enough
            retry_after_s = 0.0
        return _Answer(response.status, retry_after_s, bytes(content))


def _outcome(result: dict[str, Any] | None) -> Outcome:
    if result is None:
        return Failure("exception", "the endpoint's answer leaves this item out")
    reward, error = result.get("reward"), result.get("error")
    if error is not None:
        fields = error if isinstance(error, dict) else {"detail": error}
        reason = str(fields.get("reason", "no reason"))
        detail = f"the endpoint: {reason}: {fields.get('detail', '')}"
        return Failure(_REASONS.get(reason, "exception"), detail[:MAX_DETAIL_CHARS])
    if reward is None:
        return Failure("abstained", "the endpoint gives neither a reward nor an error")
    outcome = checked(str(reward) if isinstance(reward, bool) else reward)  # JSON's true is no number
    if isinstance(outcome, Failure):
        return Failure(outcome.reason, f"the endpoint: {outcome.detail}")
    return outcome


def _describe(answer: _Answer) -> str:
    return f"HTTP {answer.status}: {answer.body[:MAX_DETAIL_CHARS].decode(errors='replace')}"
