"""A buffer client that records its answers, for the verdict afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tba.api import LeaseReply, LeaseRequest, PushReply
from tba.clients import BufferClient
from tba.wire import decode_rollout


@dataclass
class Record:
    """The requests of one searcher and the answers of the buffer; ids are hexadecimal."""

    acknowledged: dict[str, str] = field(default_factory=dict)
    """Rollout id -> first outcome."""
    repeated: list[str] = field(default_factory=list)
    """Ids that were acknowledged once more."""
    unanswered: list[str] = field(default_factory=list)
    """Ids of pushes that ended without an answer: they may be stored or not."""
    push_s: list[float] = field(default_factory=list)
    """Duration of each answered push."""
    num_visits: int = 0
    """Training visits that it was granted."""


class RecordingClient(BufferClient):
    """Like its base; `record` may be read at any time."""

    def __init__(self, base_url: str, *, token: str | None, retry_s: float, timeout_s: float) -> None:
        super().__init__(base_url, token=token, retry_s=retry_s, timeout_s=timeout_s)
        self.record = Record()
        self._lock = threading.Lock()
        self._under_way: dict[int, Sequence[bytes]] = {}

    def push(self, payloads: Sequence[bytes]) -> PushReply:
        """Push, and remember the outcomes."""
        key, began_s = id(payloads), time.perf_counter()
        with self._lock:
            self._under_way[key] = payloads
        reply = super().push(payloads)
        with self._lock:
            self._under_way.pop(key, None)
            self.record.push_s.append(time.perf_counter() - began_s)
            for outcome in reply.outcomes:
                rollout_id = outcome.rollout_id or "unknown"
                if rollout_id in self.record.acknowledged:
                    self.record.repeated.append(rollout_id)
                else:
                    self.record.acknowledged[rollout_id] = outcome.outcome
        return reply

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Lease, and count the visits."""
        reply = super().lease(request)
        with self._lock:
            self.record.num_visits += sum(lease.kind == "train" for lease in reply.leases)
        return reply

    def settle(self) -> Record:
        """The record, with what is still under way as unanswered. A push that was repeated until it was answered, by
        another call with the same rollouts, is answered."""
        with self._lock:
            left = {decode_rollout(data).rollout_id.hex() for part in self._under_way.values() for data in part}
            self.record.unanswered = sorted(left - self.record.acknowledged.keys())
            return self.record
