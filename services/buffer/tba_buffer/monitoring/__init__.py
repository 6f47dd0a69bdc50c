"""Numbers about the buffer: the statistics of GET /v1/stats and the Prometheus metrics."""
