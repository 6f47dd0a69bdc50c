"""A Hugging Face hub on loopback, with only the routes that `huggingface_hub` needs to download a snapshot."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support import loopback

KINDS = {"models": "", "datasets": "datasets/"}


class HubServer:
    """Serves folders as repositories of models and data sets.

    Args:
        repositories: `models/ORG/NAME` or `datasets/ORG/NAME` -> folder.
        gated: repositories whose files need a licence.
    """

    def __init__(self, repositories: dict[str, Path], *, gated: frozenset[str] = frozenset()) -> None:
        self.repositories, self.gated = repositories, gated
        self.lost_bytes = 0
        """Bytes by which the stated size of every file exceeds the bytes that are sent."""
        self.downloads: list[str] = []
        """Name of every file that was sent."""
        self._server = loopback.Server(type("Handler", (_Handler,), {"hub": self}))
        self.url, self.close = self._server.url, self._server.close


class _Handler(loopback.Handler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for name, folder in self.hub.repositories.items():
            kind, _, repository = name.partition("/")
            if path.startswith(f"/api/{name}"):
                return self._describe(name, folder, path)
            prefix = f"/{KINDS[kind]}{repository}/resolve/{commit_of(name)}/"
            if path.startswith(prefix):
                return self._file(name, folder / path.removeprefix(prefix))
        return self.answer(404, {}, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _describe(self, name: str, folder: Path, path: str) -> None:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
        commit, repository = commit_of(name), name.partition("/")[2]
        if "/tree/" in path:
            listed = [{"type": "file", "path": n, "size": size, "oid": _digest(n)} for n, size in names]
            return self.answer(200, listed)
        revision = path.partition("/revision/")[2]
        if revision not in ("", "main", commit):
            return self.answer(404, {}, {"X-Error-Code": "RevisionNotFound"})
        lost = self.hub.lost_bytes
        siblings = [{"rfilename": n, "size": size + lost, "blobId": _digest(n)} for n, size in names]
        body = {
            "_id": "1",
            "id": repository,
            "sha": commit,
            "private": False,
            "tags": [],
            "siblings": siblings,
            "safetensors": {"parameters": {"F32": 132_416}, "total": 132_416},
        }
        return self.answer(200, body)

    def _file(self, name: str, file: Path) -> None:
        if name in self.hub.gated:
            return self.answer(403, {}, {"X-Error-Code": "GatedRepo"})
        body = file.read_bytes()
        if self.command == "GET":
            self.hub.downloads.append(file.name)
        headers = {"ETag": f'"{_digest(file.name)}"', "X-Repo-Commit": commit_of(name), "Accept-Ranges": "bytes"}
        return self.answer(200, body, headers)


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def commit_of(name: str) -> str:
    """Return the only commit of a repository, by its key in `HubServer.repositories`."""
    return _digest(f"commit of {name}")
