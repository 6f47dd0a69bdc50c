"""Notice of new weight versions while the buffer is away: the store knows the version that was announced last."""

from __future__ import annotations

import asyncio

from tba.concurrency import in_thread
from tba.errors import MalformedError, StoreError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_searcher.engines.weight_loader import WeightLoader
from tba_searcher.generation.status import SearcherStatus

NOTICE_S = 3.0
log = get_logger("notice")


class StoreNotice:
    """The newest version, by the word of the buffer, or of the store while the buffer is away; it never goes back.

    Args:
        newest: the version that is known at the start.
        has_news: set when there is a newer version.
    """

    def __init__(
        self, newest: PolicyVersion, *, loader: WeightLoader, status: SearcherStatus, has_news: asyncio.Event
    ) -> None:
        self.newest = newest
        self._loader, self._status, self._has_news = loader, status, has_news
        self._of_store: PolicyVersion | None = None
        """The last version that came from the store alone."""
        self._etag: str | None = None

    def hear(self, version: PolicyVersion) -> None:
        """Take the buffer's word, unless the store has told of a newer version that the buffer has not heard of yet."""
        if self._of_store is not None and version < self._of_store:
            return
        self._of_store = None
        self._take(version)

    async def watch_forever(self, every_s: float = NOTICE_S) -> None:
        """Ask the store while heartbeats find no buffer."""
        was_away = False
        while True:
            await asyncio.sleep(every_s)
            is_away = self._status.buffer_is_away
            if is_away and not was_away:
                log.warning("buffer is away: new versions come from the store", newest=str(self.newest))
            was_away = is_away
            if is_away:
                await self._ask()

    async def _ask(self) -> None:
        try:
            found = await in_thread(lambda: self._loader.latest(self._etag))
        except (StoreError, MalformedError) as error:
            log.debug("store not asked", detail=str(error))
            return
        # the buffer may have answered meanwhile
        if found is None or not self._status.buffer_is_away:
            return
        version, self._etag = found
        if version > self.newest:
            self._of_store = version
            self._take(version)

    def _take(self, version: PolicyVersion) -> None:
        if version != self.newest:
            self.newest = version
            self._has_news.set()
