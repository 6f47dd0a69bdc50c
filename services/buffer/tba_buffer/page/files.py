"""The files of the page, served from memory at `/` and `/page/...`.

They hold no data of a run, so they need no token. The page sends the bearer token with its own requests, and keeps it
in memory (on loopback: until the tab is closed). The page inserts model output as text, never as markup. As a second
defence, the content security policy below forbids inline scripts, inline styles, other hosts and framing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response

from tba.errors import NotFoundError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # asked again each time, and answered with 304: a new release must not run with the old release's files
    "cache-control": "no-cache",
}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page, with its `content-type` and ETag."""

    content: bytes
    media_type: str
    etag: str


def page_router(index: str = "index.html") -> APIRouter:
    """Build the endpoints that serve the page's files without a token."""
    api = APIRouter(include_in_schema=False)

    @api.get("/")
    async def start(request: Request) -> Response:
        return page_answer(index, request)

    @api.get("/page/{path:path}")
    async def page_file(path: str, request: Request) -> Response:
        return page_answer(path, request)

    return api


def page_answer(path: str, request: Request) -> Response:
    """Return a file of the page, or that it has not changed; NotFoundError if there is none."""
    found = page_files().get(path)
    if found is None:
        raise NotFoundError(f"the page has no file {path[:200]!r}")
    headers = {**HEADERS, "etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@cache
def page_files() -> dict[str, PageFile]:
    """Return the page's files, keyed by their path below `static`; only the first call reads the disk."""
    return dict(_read(files("tba_buffer.page") / "static", ""))


def _read(folder: Traversable, prefix: str) -> list[tuple[str, PageFile]]:
    found: list[tuple[str, PageFile]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
            continue
        media_type = MEDIA_TYPES.get("." + entry.name.rpartition(".")[2])
        # only what is named: an editor's backup beside the files is no part of the page
        if media_type is not None:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append((prefix + entry.name, PageFile(content, media_type, etag)))
    return found
