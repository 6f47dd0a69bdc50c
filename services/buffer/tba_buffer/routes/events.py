"""What happens in the run, as it happens."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response

from tba.api import RunEvent
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer
from tba_buffer.event_stream import EventStreamResponse

ROLES = ("viewer",)
STREAM = {EventStreamResponse.media_type: {"schema": {"type": "string", "description": RunEvent.__doc__}}}


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """The stream."""
    api = APIRouter(prefix="/v1")

    @api.get(
        "/events",
        operation_id="events",
        response_class=Response,
        dependencies=[Depends(auth.require(*ROLES))],
        responses={200: {"description": "the stream", "content": STREAM}, **problems(429)},
    )
    async def events(request: Request, last_event_id: Annotated[str | None, Header(max_length=200)] = None) -> Response:
        """Server-sent events: `run`, the run as a whole, then what changes. `Last-Event-ID` goes on after a cut."""
        check = partial(auth.check, request.headers.get("authorization", ""), ROLES)
        return EventStreamResponse(buffer.events, await buffer.events.open(last_event_id), check=check)

    return api
