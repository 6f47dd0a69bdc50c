"""Any Authorization header that is not a known token of the right role is refused with a problem document."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from fastapi import Depends, FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.server import Authenticator
from tba.server.problems import install_problem_handlers

TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer", "operator", "viewer")}


def status_of(header: bytes | None) -> tuple[int, str]:
    app, auth = FastAPI(), Authenticator(TOKENS)
    install_problem_handlers(app)

    @app.get("/", dependencies=[Depends(auth.require("viewer"))])
    async def look() -> dict[str, str]:
        return {"status": "ok"}

    async def ask() -> httpx2.Response:
        headers = [] if header is None else [(b"authorization", header)]
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://app") as client:
            return await client.get("/", headers=headers)

    reply = asyncio.run(ask())
    return reply.status_code, reply.headers["content-type"]


@settings(deadline=None, max_examples=60)
@given(
    header=st.binary(max_size=60)
    | st.binary(max_size=40).map(lambda token: b"Bearer " + token)
    | st.sampled_from([*TOKENS.values()]).map(lambda token: f"Basic {token}".encode())
)
def test_what_is_no_known_token_is_refused(header: bytes) -> None:
    assert status_of(header) == (401, "application/problem+json")


@pytest.mark.parametrize(
    ("role", "status"), [("viewer", 200), ("operator", 200), ("searcher", 403), ("trainer", 403), (None, 401)]
)
def test_roles(role: str | None, status: int) -> None:
    assert status_of(None if role is None else f"bearer {TOKENS[role]}".encode())[0] == status
