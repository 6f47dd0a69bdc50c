"""The searchers of a local run: as many as are wanted, while the run goes on.

Searcher i runs while i is below the wanted number. Too many: the highest numbers get SIGTERM and drain (finish, push,
give leases back), and the crew does not mourn them. Too few: the lowest that are missing are started. A searcher that
dies is the crew's business (`local.max_searcher_restarts`); one that the crew gave up is started again only when
somebody asks for a number anew.

    waits for                       unblocked by     deadline
    a searcher that drains          its end          the longer of local.stop_timeout_s and searcher.drain_s + 10 s,
                                                     then SIGKILL; meanwhile the run goes on
"""

from __future__ import annotations

import asyncio

from tba.api import SearchersInfo
from tba.config import Recipe
from tba.local.console import Console
from tba.local.crew import Crew
from tba.local.services import Services

DRAIN_SLACK_S = 10.0


class Fleet:
    """Starts and stops searchers.

    Args:
        recipe: its number holds until somebody asks for another one.
    """

    def __init__(self, recipe: Recipe, *, crew: Crew, services: Services, console: Console) -> None:
        self._crew, self._services, self._console = crew, services, console
        self._recipe_num = recipe.searcher.num_searchers
        self._stop_s = max(recipe.local.stop_timeout_s, recipe.searcher.drain_s + DRAIN_SLACK_S)
        self._revision = 0
        self._wanted: int | None = None
        self._stopping: set[asyncio.Task[int]] = set()

    async def keep(self, searchers: SearchersInfo | None) -> None:
        """Start and stop what is missing and too much; does not wait for what drains.

        Args:
            searchers: what the buffer service says; None: as the recipe says.

        Raises:
            ChildError: a searcher cannot be started.
        """
        wanted = self._recipe_num if searchers is None or searchers.wanted is None else searchers.wanted
        revision = 0 if searchers is None else searchers.revision
        asked_anew, self._revision = revision != self._revision, revision
        if self._wanted not in (None, wanted):
            self._console.result(f"searchers: {self._wanted} -> {wanted}")
        self._wanted = wanted
        for name in sorted(self._crew.searchers(), key=_number, reverse=True):
            if _number(name) >= wanted and self._crew.retire(name):
                stop = self._crew.stop_one(name, self._stop_s)
                self._stopping.add(task := asyncio.create_task(stop, name=f"stop {name}"))
                task.add_done_callback(self._stopping.discard)
        for number in range(wanted):
            spec = self._services.searcher(number)
            if self._crew.may_start(spec.name, though_given_up=asked_anew):
                await self._crew.start(spec)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
