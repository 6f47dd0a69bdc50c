"""A real headless Chromium for the tests of the page: Debian's package, or any that CHROMIUM names."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the path of a Chromium on this machine; None if there is none."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser; skip the test if this machine has none."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: install Debian's package chromium, or name one in CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that containers lack; the pages are our own
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def until(page: Page, expression: str, *, timeout_s: float = 20.0) -> None:
    """Poll until a JavaScript expression is true. Playwright's own wait needs eval, which the page's CSP forbids."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}\nthe page shows:\n{page.inner_text('body')}"
        page.wait_for_timeout(50)


class Watched:
    """Collects a page's errors, the hosts that it sends requests to, and the bytes that it receives."""

    def __init__(self, page: Page) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.num_bytes = 0
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.on("response", self._count)

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.errors.append(text)

    def _count(self, response: object) -> None:
        length = getattr(response, "headers", {}).get("content-length", "0")
        self.num_bytes += int(length)


Open = Callable[..., tuple["Page", Watched]]
"""The fixture `open_page`: opens a view of the page of a served buffer."""
