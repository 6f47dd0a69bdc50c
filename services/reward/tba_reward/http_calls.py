"""One batch over HTTP: retries, halving, a deadline, and an outcome for every item whatever comes back."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import urllib3
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.util import parse_url

from tba.api.scores import ScoreReason
from tba_reward.scorers.base import Failure, Item, Outcome, checked

MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_DETAIL_CHARS = 300
FIRST_PAUSE_S = 0.1
_REFUSED_AS_A_WHOLE = (400, 413, 422)
_CHUNK_BYTES = 1 << 16
_REASONS: dict[str, ScoreReason] = {reason: reason for reason in get_args(ScoreReason)}


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    retry_after_s: float
    body: bytes


class EndpointCalls:
    """Asks one endpoint; safe to share between threads.

    Args:
        url: where batches are posted.
        task: the task name of the items.
        token: bearer token, if the endpoint wants one.
        num_retries: most repetitions of one request.
        max_connections: connections that are kept open.
    """

    def __init__(self, url: str, *, task: str, token: str | None, num_retries: int, max_connections: int) -> None:
        self.url = url
        self._task, self._num_retries = task, num_retries
        self._target = parse_url(url).request_uri
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._http = urllib3.connection_from_url(url, maxsize=max_connections, retries=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def score(self, items: Sequence[Item], timeout_s: float) -> list[Outcome]:
        """One outcome per item, in order, by the deadline."""
        return self._score_until(items, time.monotonic() + timeout_s)

    def _score_until(self, items: Sequence[Item], deadline_s: float) -> list[Outcome]:
        answer = self._ask(self._body(items), deadline_s)
        if isinstance(answer, Failure):
            return [answer] * len(items)
        if answer.status in _REFUSED_AS_A_WHOLE and len(items) > 1:
            half = len(items) // 2
            return self._score_until(items[:half], deadline_s) + self._score_until(items[half:], deadline_s)
        if answer.status in _REFUSED_AS_A_WHOLE:
            return [Failure("malformed", f"the endpoint refuses the item: {_said(answer)}")]
        if answer.status != 200:
            return [Failure("exception", f"{self.url}: {_said(answer)}")] * len(items)
        return _outcomes(answer.body, len(items))

    def _body(self, items: Sequence[Item]) -> bytes:
        entries = [
            {
                "item_id": str(number),
                "task": self._task,
                "prompt": item.prompt,
                "response": item.response,
                "data": dict(item.data),
                "finish_reason": item.finish_reason,
            }
            for number, item in enumerate(items)
        ]
        return json.dumps({"items": entries}).encode()

    def _ask(self, body: bytes, deadline_s: float) -> _Answer | Failure:
        """Send until there is an answer that a repetition would not change."""
        failure = Failure("unreachable", f"{self.url} was not asked before the deadline")
        for attempt in range(self._num_retries + 1):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return failure
            pause_s = FIRST_PAUSE_S * 2**attempt * (0.5 + random.random() / 2)
            try:
                answer = self._post(body, deadline_s)
            except (ReadTimeoutError, TimeoutError):
                return Failure("unreachable", f"no answer from {self.url} before the deadline")
            except (HTTPError, OSError) as error:
                failure = Failure("unreachable", f"{self.url}: {type(error).__name__}: {error}"[:MAX_DETAIL_CHARS])
            else:
                if answer.status != 429 and answer.status < 500:
                    return answer
                failure = Failure("unreachable", f"{self.url}: {_said(answer)}")
                pause_s = max(pause_s, answer.retry_after_s)
            if attempt == self._num_retries or time.monotonic() + pause_s >= deadline_s:
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
        return _Answer(response.status, _seconds(response.headers.get("retry-after")), bytes(content))


def _outcomes(body: bytes, num_items: int) -> list[Outcome]:
    """One outcome per item. Only a body that is no reply at all fails all of them: what is wrong in the result of one
    item (NaN, which strict JSON does not know; a text; a huge number; bytes that are no text) fails that item."""
    try:
        reply = json.loads(body.decode("utf-8", "replace"), parse_int=float)
        if not isinstance(reply, dict) or not isinstance(reply.get("results"), list):
            raise ValueError('it must be an object {"results": [...]}')
    except (ValueError, RecursionError) as error:
        return [Failure("exception", f"the endpoint's answer is not a score reply: {error}")] * num_items
    by_id = {_item_id(result): result for result in reply["results"] if isinstance(result, dict)}
    return [_outcome(by_id.get(str(number))) for number in range(num_items)]


def _item_id(result: dict[str, Any]) -> str:
    item_id = result.get("item_id")
    return item_id if isinstance(item_id, str) else ""


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


def _said(answer: _Answer) -> str:
    return f"HTTP {answer.status}: {answer.body[:MAX_DETAIL_CHARS].decode(errors='replace')}"


def _seconds(retry_after: str | None) -> float:
    try:
        return max(float(retry_after or 0), 0.0)
    except ValueError:  # a date: rare, and the usual pause will do
        return 0.0
