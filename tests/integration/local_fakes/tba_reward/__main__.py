"""A reward service that is ready and nothing else."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECIPE = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


ThreadingHTTPServer((RECIPE["reward"]["host"], RECIPE["reward"]["port"]), Handler).serve_forever()
