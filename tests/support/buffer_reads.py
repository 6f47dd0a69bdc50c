"""Plain HTTP requests to a buffer, and a check that no GET and no command fails."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

READS = (
    "/readyz",
    "/metrics",
    "/v1/run",
    "/v1/run/changes",
    "/v1/run/settings",
    "/v1/run/searchers",
    "/v1/stats",
    "/v1/ledger",
    "/v1/rescore",
    "/v1/rollouts",
    "/v1/rollouts?order=best",
    "/v1/rollouts?order=worst",
    "/v1/rollouts?status=failed",
    "/v1/curves",
    "/v1/prompts",
    "/v1/prompts?order=best&contains=1",
    "/v1/prompts/train-0",
)


def ask(url: str, path: str, method: str = "GET", body: Any = None, token: str | None = None) -> tuple[int, bytes]:
    """Send a request; return status and body. Bytes are sent as msgpack, a text as JSON without encoding it."""
    is_msgpack = isinstance(body, bytes)
    data = body if is_msgpack or body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
    headers = {"content-type": "application/msgpack" if is_msgpack else "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url + path, method=method, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def readyz(url: str) -> tuple[int, dict[str, Any]]:
    """Return the status and document of `/readyz`."""
    status, body = ask(url, "/readyz")
    return status, json.loads(body)


def read_everything(url: str, *more: str) -> None:
    """Check that no GET (READS, `more` and each listed rollout), no pause and no resume answers with 500 or above.

    Raises:
        AssertionError: some did; it names them, with their answers.
    """
    failed: dict[str, tuple[int, bytes]] = {}
    rollouts = [item["rollout_id"] for item in json.loads(ask(url, "/v1/rollouts?limit=100")[1]).get("rollouts", ())]
    for path in (*READS, *more, *(f"/v1/rollouts/{rollout_id}" for rollout_id in rollouts)):
        status, body = ask(url, path)
        if status >= 500:
            failed[path] = status, body
    for command in ("pause", "resume"):
        status, body = ask(url, "/v1/run", "POST", {"command": command})
        if status >= 500:
            failed[command] = status, body
    assert not failed
