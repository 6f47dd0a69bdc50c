"""Downloads of the page: a browser writes them to disk itself, and cannot send a token with them.

    GET /v1/downloads?FILTERS    with a token: {"path": "downloads/ID"}, which is good for one download within LINK_S
    GET /downloads/ID            without: the stream of Parquet

Both are for the page alone, and in no OpenAPI document; other clients send a token to GET /v1/rollouts.parquet.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from tba.errors import BusyError, NotFoundError
from tba.server import Authenticator
from tba_buffer.api.rollouts import rollout_filter
from tba_buffer.rollouts.parquet import ExportResponse
from tba_buffer.rollouts.selection import RolloutFilter
from tba_buffer.service import Buffer

LINK_S = 60.0
MAX_LINKS = 100
"""Most unused links."""
NO_STORE = {"cache-control": "no-store"}


class DownloadLinks:
    """Links that nobody has used.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unused: dict[str, tuple[float, RolloutFilter]] = {}
        """Id -> when it ends, and what it is for."""

    def add(self, wanted: RolloutFilter) -> str:
        """Return the id of a new link.

        Raises:
            BusyError: there are MAX_LINKS.
        """
        now_s, link = self._clock(), secrets.token_urlsafe(32)
        self._unused = {known: item for known, item in self._unused.items() if item[0] >= now_s}
        # refused, and no older one dropped: one viewer must not end the links of others
        if len(self._unused) >= MAX_LINKS:
            wait_s = min(ends_s for ends_s, _ in self._unused.values()) - now_s
            raise BusyError(
                f"{len(self._unused)} downloads were asked for and not begun; wait {wait_s:.0f} s, and try again",
                retry_after_s=wait_s,
                wait="downloads",
            )
        self._unused[link] = now_s + LINK_S, wanted
        return link

    @contextmanager
    def use(self, link: str) -> Iterator[RolloutFilter]:
        """Yield what a link is for; it has ended unless the block raises.

        Raises:
            NotFoundError: there is no such link, it was used, or it has ended.
        """
        ends_s, wanted = self._unused.pop(link, (0.0, None))
        if wanted is None or self._clock() > ends_s:
            raise NotFoundError(
                f"this download was begun already, or {LINK_S:.0f} s are over: ask the page for another"
            )
        try:
            yield wanted
        except BaseException:
            self._unused[link] = ends_s, wanted
            raise


def downloads_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints of downloads."""
    api, links = APIRouter(include_in_schema=False), DownloadLinks()

    @api.get("/v1/downloads", dependencies=[Depends(auth.require("viewer"))])
    async def link_download(
        wanted: Annotated[RolloutFilter, Depends(rollout_filter)], response: Response
    ) -> dict[str, str]:
        # an error is a sentence here, and a failed download without one later
        await buffer.rollouts.exports.check(wanted)
        response.headers.update(NO_STORE)
        return {"path": f"downloads/{links.add(wanted)}"}

    @api.get("/downloads/{link}")
    async def download(link: str) -> Response:
        with links.use(link) as wanted:
            content = await buffer.rollouts.exports.parquet(wanted, tokens=True)
        name = f"{buffer.context.run}-rollouts.parquet"
        headers = {"content-disposition": f'attachment; filename="{name}"', **NO_STORE}
        return ExportResponse(content, headers=headers)

    return api
