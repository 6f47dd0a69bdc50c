"""The promises of the buffer, as seen from outside: every acknowledged rollout, and every acknowledged step.

It stands between the links and the buffer, decodes requests and answers by itself (plain MessagePack and JSON, nothing
of the product), and notes an answer before the client can see it. So nothing that a client was told is missing here.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import msgspec

from tests.system.chaos.relay import Answer, Request

DIGEST_BYTES = 8


@dataclass(frozen=True)
class Acked:
    at_s: float
    lineage: int
    step: int
    batch_id: str


class Observer:
    """Takes what the relay before the buffer sees; read by other threads under no lock but for whole lists."""

    def __init__(self) -> None:
        self.rollouts: dict[bytes, bytes | None] = {}
        """Id of every acknowledged rollout -> digest of its bytes; None: its reward was unknown, so they may change."""
        self.outcomes: Counter[str] = Counter()
        self.twice_new: list[str] = []
        """Ids that were acknowledged as new more than once."""
        self.acks: list[Acked] = []
        self.last_push_s: dict[str, float] = defaultdict(float)
        """Searcher -> when a push of it was last acknowledged."""
        self.errors: list[str] = []
        self._new: set[str] = set()
        self._lock = threading.Lock()

    def see(self, request: Request, answer: Answer) -> None:
        path = request.path.split("?")[0]
        try:
            if request.method == "POST" and path == "/v1/rollouts" and answer.status == 200:
                self._push(request.body, answer.body)
            elif request.method == "POST" and path.endswith("/ack") and answer.status == 204:
                self._ack(path.split("/")[-2], request.body)
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            self.errors.append(f"{request.method} {path}: {type(error).__name__}: {error}")

    def acks_since(self, at_s: float) -> list[Acked]:
        with self._lock:
            found = []
            for acked in reversed(self.acks):
                if acked.at_s < at_s:
                    break
                found.append(acked)
            return found[::-1]

    def _push(self, body: bytes, reply: bytes) -> None:
        now_s = time.monotonic()
        outcomes = json.loads(reply)["outcomes"]
        payloads = msgspec.msgpack.decode(body)["rollouts"]
        for payload, outcome in zip(payloads, outcomes, strict=True):
            self.outcomes[outcome["outcome"]] += 1
            if outcome["outcome"] == "refused":
                continue
            document = msgspec.msgpack.decode(payload)
            is_final = document["reward_status"] == "scored"
            digest = hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest() if is_final else None
            self.rollouts.setdefault(document["rollout_id"], digest)
            self.last_push_s[document["searcher_id"]] = now_s
            if outcome["outcome"] == "new":
                if outcome["rollout_id"] in self._new:
                    self.twice_new.append(outcome["rollout_id"])
                self._new.add(outcome["rollout_id"])

    def _ack(self, batch_id: str, body: bytes) -> None:
        document = json.loads(body)
        with self._lock:
            self.acks.append(Acked(time.monotonic(), document["lineage"], document["step"], batch_id))
