"""Times and answers of the requests that carry the load."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TIMED = {("POST", "/v1/rollouts"): "push", ("POST", "/v1/batches"): "draw_batch", ("POST", "/v1/leases"): "lease"}


class RequestMetrics:
    """Times and results of the requests in TIMED, by operation. A draw's time includes its long poll.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "tba_request_seconds",
            "Time from the first byte of a request to the last of its answer",
            ["operation"],
            buckets=TIME_BUCKETS,
            registry=registry,
        )
        self.answered = Counter("tba_requests", "Requests answered", ["operation", "status"], registry=registry)
        self.in_flight = Gauge("tba_requests_in_flight", "Requests being served", ["operation"], registry=registry)


class RequestTimes:
    """ASGI middleware that fills RequestMetrics."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        operation = TIMED.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if operation is None:
            await self.app(scope, receive, send)
            return
        # status "none": the connection ended before an answer began
        metrics, status, began_s = self._metrics, "none", time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        # a gauge of its own: a long poll that is held shows in no count of answers
        in_flight = metrics.in_flight.labels(operation)
        in_flight.inc()
        try:
            await self.app(scope, receive, watched)
        finally:
            in_flight.dec()
            metrics.seconds.labels(operation).observe(time.perf_counter() - began_s)
            metrics.answered.labels(operation, status).inc()
