"""When a service of a local run can be used."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

READY_POLL_S = 0.1


async def wait_until_ready(url: str) -> None:
    """Return when GET /readyz answers 200. The caller bounds the wait."""
    while not await asyncio.to_thread(_is_ready, url):
        await asyncio.sleep(READY_POLL_S)


def _is_ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/readyz", timeout=2.0):
            return True
    except (urllib.error.URLError, OSError):
        return False
