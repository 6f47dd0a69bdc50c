"""A Hugging Face hub on loopback: what `huggingface_hub` asks to download a snapshot or to upload a folder, no more."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token_of_the_tests"
"""May write."""
KINDS = {"models": "", "datasets": "datasets/"}


class HubServer:
    """Serves folders.

    Args:
        repositories: `models/ORG/NAME` or `datasets/ORG/NAME` -> folder.
        gated: repositories whose files need a licence.
        uploads: folder for the repositories that clients make; None: they may write nothing.
    """

    def __init__(
        self, repositories: dict[str, Path], *, gated: frozenset[str] = frozenset(), uploads: Path | None = None
    ) -> None:
        self.repositories, self.gated, self.uploads = repositories, gated, uploads
        self.private: set[str] = set()
        """Repositories that only their owner can read."""
        self.commit_status = 200
        """Another one refuses every commit."""
        self.commits: list[str] = []
        """Messages of the commits that clients made."""
        self.objects: dict[str, bytes] = {}
        """Large files that were sent, by their digest."""
        self.lost_bytes = 0
        """So many bytes less are sent of every file than its description says."""
        self.downloads: list[str] = []
        """Path of every file that was sent."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            return self._send(400, b"{}", {})
        self.hub.objects[oid] = body
        return self._send(200, b"{}", {})

    def do_POST(self) -> None:
        body, path, hub = self._body(), unquote(urlsplit(self.path).path), self.hub
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or hub.uploads is None:
            return self._send(401, b'{"error": "Invalid username or password."}', {})
        if path == "/api/validate-yaml":
            return self._send_json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body), hub.uploads)
        if path.endswith(".git/info/lfs/objects/batch"):
            wanted = [
                {**item, "actions": {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return self._send_json({"transfer": "basic", "objects": wanted})
        name, _, action = path.removeprefix("/api/").removesuffix("/main").rpartition("/")
        if name not in hub.repositories:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if action == "preupload":
            modes = {True: "lfs", False: "regular"}
            files = [
                {
                    "path": file["path"],
                    "uploadMode": modes[file["path"].endswith(".safetensors")],
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._send_json({"files": files})
        assert action == "commit", path
        return self._commit(name, [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any], uploads: Path) -> None:
        name = f"{asked.get('type') or 'model'}s/{asked['organization']}/{asked['name']}"
        address = f"{self.hub.url}/{name.removeprefix('models/')}"
        if name in self.hub.repositories:
            return self._send(409, json.dumps({"url": address}).encode(), {})
        folder = uploads / name
        folder.mkdir(parents=True)
        self.hub.repositories[name] = folder
        if asked.get("visibility") == "private" or asked.get("private"):  # the name in huggingface_hub before 2
            self.hub.private.add(name)
        return self._send_json({"url": address})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        folder = self.hub.repositories[name]
        if self.hub.commit_status != 200:
            return self._send(self.hub.commit_status, b"{}", {})
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.hub.commits.append(value["summary"])
                case "file" | "lfsFile":
                    path = folder / value["path"]
                    path.parent.mkdir(exist_ok=True)
                    is_small = "content" in value
                    path.write_bytes(base64.b64decode(value["content"]) if is_small else self.hub.objects[value["oid"]])
                case "deletedFile":
                    (folder / value["path"]).unlink()
        address = f"{self.hub.url}/{name.removeprefix('models/')}/commit/{commit_of(name)}"
        return self._send_json({"commitUrl": address, "commitOid": commit_of(name)})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send_json(self, document: dict[str, Any]) -> None:
        self._send(200, json.dumps(document).encode(), {})

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for name, folder in self.hub.repositories.items():
            kind, _, repository = name.partition("/")
            if path.startswith(f"/api/{name}"):
                return self._describe(name, folder, path)
            prefix = f"/{KINDS[kind]}{repository}/resolve/{commit_of(name)}/"
            if path.startswith(prefix):
                return self._file(name, folder / path.removeprefix(prefix))
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _describe(self, name: str, folder: Path, path: str) -> None:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
        commit, repository = commit_of(name), name.partition("/")[2]
        if "/tree/" in path:
            listed = [{"type": "file", "path": n, "size": size, "oid": _digest(n)} for n, size in names]
            return self._send(200, json.dumps(listed).encode(), {})
        revision = path.partition("/revision/")[2]
        if revision not in ("", "main", commit):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        lost = self.hub.lost_bytes
        siblings = [{"rfilename": n, "size": size + lost, "blobId": _digest(n)} for n, size in names]
        body = {
            "_id": "1",
            "id": repository,
            "sha": commit,
            "private": name in self.hub.private,
            "tags": [],
            "siblings": siblings,
            "safetensors": {"parameters": {"F32": 132_416}, "total": 132_416},
        }
        return self._send(200, json.dumps(body).encode(), {})

    def _file(self, name: str, file: Path) -> None:
        if name in self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        body = file.read_bytes()
        if self.command == "GET":
            self.hub.downloads.append(file.name)
        headers = {"ETag": f'"{_digest(file.name)}"', "X-Repo-Commit": commit_of(name), "Accept-Ranges": "bytes"}
        return self._send(200, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def commit_of(name: str) -> str:
    """The one commit of a repository, by its key in `HubServer.repositories`."""
    return _digest(f"commit of {name}")
