"""Open a page in a browser without showing its token: the arguments of a process are visible to other users."""

from __future__ import annotations

import html
import os
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>tba</title>\n'
    '<meta http-equiv="refresh" content="0; url={url}">\n'
    '<p><a href="{url}">the page of the run</a></p>\n'
)


@contextmanager
def opened_page(url: str) -> Iterator[None]:
    """Open an address by a file that only this user can read, and which leads there; delete the file at the end."""
    with tempfile.TemporaryDirectory(prefix="tba-view-") as folder:
        path = Path(folder) / "page.html"
        # the mode from the first byte on
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(REDIRECT.format(url=html.escape(url)))
        webbrowser.open(path.as_uri())
        yield
