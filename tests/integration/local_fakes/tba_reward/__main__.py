"""A reward service that is ready, names one task, and nothing else."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECIPE = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        rewards = [{"task": "addition", "version": "addition-1", "health": "ok"}]
        body = json.dumps({"rewards": rewards}).encode() if self.path == "/v1/rewards" else b""
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


ThreadingHTTPServer((RECIPE["reward"]["host"], RECIPE["reward"]["port"]), Handler).serve_forever()
