"""A stand-in for the server of Weights & Biases: what its client asks of one that takes runs, and nothing else."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

ENTITY = "tester"


class WandbServer(ThreadingHTTPServer):
    """Keeps what is sent: the runs, their history, and the files. `with server.running():` serves on loopback."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, dict[str, Any]] = {}
        """Id of a run -> the last description of it."""
        self.history: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.unknown: list[str] = []
        """Operations that this server does not know."""

    @contextmanager
    def running(self) -> Iterator[WandbServer]:
        """Serve in a thread."""
        thread = Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data that answers an operation of GraphQL."""
        words = query.replace("(", " ").split()
        match words[1]:
            case "UpsertBucket":
                self.runs.setdefault(variables["name"], {}).update(
                    {key: value for key, value in variables.items() if value}
                )
                project = {"id": "project", "name": variables["project"], "entity": {"id": "entity", "name": ENTITY}}
                bucket = {"id": "run", "name": variables["name"], "displayName": variables["displayName"]}
                return {"upsertBucket": {"bucket": {**bucket, "config": "{}", "project": project}, "inserted": True}}
            case "Viewer":
                return {"viewer": {"id": "viewer", "entity": ENTITY, "flags": "{}", "teams": {"edges": []}}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "OrganizationCoreWeaveOrganizationID":
                return {"entity": None}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": self._upload(name)} for name in variables["files"]]
                return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        self.unknown.append(words[1])
        return {}

    def _upload(self, name: str) -> str:
        return f"{self.url}/upload/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        reply: dict[str, Any] = {}
        if self.path == "/graphql":
            request = json.loads(body)
            reply = {"data": self.server.answer(request["query"], request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.history += map(json.loads, lines)
        elif self.path.startswith("/upload/"):
            self.server.files[self.path.removeprefix("/upload/")] = body
        answer = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
