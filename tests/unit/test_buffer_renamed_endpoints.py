"""Endpoints of older releases: each answers with the name that it has now."""

from __future__ import annotations

import httpx2
import pytest
from tba_buffer.api.app import RENAMED_ENDPOINTS, build_app

from tests.support.buffer import make_recipe


@pytest.mark.parametrize(("method", "path"), RENAMED_ENDPOINTS)
async def test_an_old_endpoint_names_the_new_one(method: str, path: str) -> None:
    app = build_app(make_recipe(), None)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://app") as client:
        reply = await client.request(method, path, json={"version": "1-1", "token": "t"})
    assert (reply.status_code, reply.json()["type"]) == (404, "urn:tba:problem:not-found")
    assert reply.json()["detail"] == f"{method} {path} is now {method} {RENAMED_ENDPOINTS[method, path]}"
    assert method.lower() in app.openapi()["paths"][RENAMED_ENDPOINTS[method, path]]


def test_announcements_of_versions_are_renamed() -> None:
    assert RENAMED_ENDPOINTS["POST", "/v1/marks"] == "/v1/versions"
