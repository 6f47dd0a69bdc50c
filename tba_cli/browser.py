"""Open a page in a browser without showing its token: the arguments of a process are visible to other users."""

from __future__ import annotations

import html
import os
import tempfile
import time
import webbrowser
from pathlib import Path
from types import TracebackType

READ_S = 5.0
"""A browser that has to start first reads its file within this time."""
REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>tba</title>\n'
    '<meta http-equiv="refresh" content="0; url={url}">\n'
    '<p><a href="{url}">the page of the run</a></p>\n'
)


class BrowserPage:
    """Opens an address. One with a token is put into a file that only this user can read, and which leads there.

    The file is deleted at the end of the block.
    """

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> BrowserPage:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete the file."""
        if self._folder is not None:
            self._folder.cleanup()

    def open(self, url: str) -> None:
        """Open an address in the browser."""
        webbrowser.open(self._file_for(url).as_uri() if "#" in url else url)

    def wait_until_read(self) -> None:
        """Wait until a browser must have read the file, for a command that ends now."""
        if self._folder is not None:
            time.sleep(READ_S)

    def _file_for(self, url: str) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="tba-view-")
        path = Path(self._folder.name) / "page.html"
        # the mode from the first byte on
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(REDIRECT.format(url=html.escape(url)))
        return path
