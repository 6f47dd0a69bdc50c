"""A reward service that is ready, names one task, and nothing else; FAKE_REWARD=misspelt: a scorer did not start,
FAKE_REWARD=slow: one starts for ever."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECIPE = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())

HEALTH = {"misspelt": "ValueError: module graders has no function 'smae'", "slow": "it is starting"}.get(
    os.environ.get("FAKE_REWARD", ""), "ok"
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        scorer = {"name": "python", "kind": "python", "weight": 1.0, "version": "1", "health": HEALTH}
        reward = {"task": "addition", "version": "addition-1", "health": HEALTH, "scorers": [scorer]}
        is_ready = self.path != "/readyz" or HEALTH == "ok"
        problem = {"type": "urn:tba:not-ready", "detail": f"addition: python: {HEALTH}"}
        body = json.dumps({"rewards": [reward], **problem}).encode()
        self.send_response(200 if is_ready else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


ThreadingHTTPServer((RECIPE["reward"]["host"], RECIPE["reward"]["port"]), Handler).serve_forever()
