"""Open pages in a browser without showing their tokens: the arguments of a process are visible to other users."""

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


class BrowserPages:
    """Opens addresses. One with a token is put into a file that only this user can read, and which leads there.

    The files are deleted at the end of the block.
    """

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_files = 0

    def __enter__(self) -> BrowserPages:
        """Return the pages."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete the files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def open(self, url: str) -> None:
        """Open an address in the browser."""
        webbrowser.open(self._file_for(url).as_uri() if "#" in url else url)

    def wait_until_read(self) -> None:
        """Wait until a browser must have read the files, for a command that ends now."""
        if self._folder is not None:
            time.sleep(READ_S)

    def _file_for(self, url: str) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tba-view-")
        self._num_files += 1
        path = Path(self._folder.name) / f"{self._num_files}.html"
        # the mode from the first byte on
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(REDIRECT.format(url=html.escape(url)))
        return path
