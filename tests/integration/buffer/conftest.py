"""The live page of a served buffer, in a Chromium; and a buffer process with its Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import Open, Watched, until
from tests.support.buffer import Stack, start_stack
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.page_run import train

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open a view of a served buffer, and wait until its header knows the run."""
    contexts: list[Any] = []

    def open_view(buffer: BufferThread, view: str = "#/", **options: Any) -> tuple[Page, Watched]:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        watched = Watched(page)
        page.goto(f"{buffer.url}/{view}")
        until(page, "document.getElementById('run-name').textContent === 'test'")
        return page, watched

    yield open_view
    for context in contexts:
        context.close()


@pytest.fixture
def trained(serve_buffer: ServeBuffer, tmp_path: Path) -> BufferThread:
    served = serve_buffer(
        store={"url": f"file://{tmp_path}"}, sampling={"prompts_per_batch": 3, "min_size_to_sample": 4}
    )
    train(served.client())
    return served


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    started = start_stack(tmp_path)
    yield started
    started.stop()
