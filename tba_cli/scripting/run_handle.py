"""`tba.Run`: read a run in progress or an ended run from Python.

The buffer service answers while the run is in progress. For an ended run, a read-only view of its files answers.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack
from urllib.parse import unquote

from tba.api import RolloutInfo, RolloutOrder, RunInfo, RunSummary
from tba.clients import BufferClient
from tba.clients.buffer import RolloutFilters
from tba.errors import ConfigError
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import RETRY_S, TOKEN_MARK, endpoints_of, open_target, page_url, run_folder
from tba_cli.scripting.command import Command

MAX_TEXT_CHARS = 10_000
MAX_PER_PAGE = 100
STEPS_PER_PAGE = 2000
"""Steps per request of curves: the service's largest number of points, so that no point merges several steps."""
OVER = ("done", "failed")


class Run:
    """A run in progress, or an ended run, which is read through a view that changes nothing.

    The first call that needs the view starts it, which takes seconds. Later calls share it. `close()`, the end of a
    `with` block or of the interpreter ends it. Every call may raise ServiceError: the service refuses or is away.

    Args:
        name: a name below runs/, or the path of a run folder; None: the newest run.
        url: address of the buffer service of a run elsewhere, instead of a name.
        token: token of the operator or a viewer, with `url`.
        ca_file: PEM file of the certificate authorities that are trusted for an https URL.

    Raises:
        ConfigError: there is no such run.

    Examples:
        >>> with tba.Run("quickstart-seed0") as run:
        ...     frame = pandas.DataFrame(run.metrics())
        >>> live = tba.Run(url="https://buffer:8700", token=token)
    """

    def __init__(
        self,
        name: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        if name is not None and url is not None:
            raise ConfigError(f"give either the name of a run here ({os.fspath(name)!r}) or url={url!r}, not both")
        if url is None and token is not None:
            raise ConfigError("token goes with url: a run here has its tokens in its folder")
        self._url, self._token, self._ca_file = url, token, ca_file
        self._folder: RunFolder | None = None
        if url is None:
            target = argparse.Namespace(run=None if name is None else os.fspath(name), run_dir=None)
            self._folder = run_folder(target)
            if not self._folder.has_begun:
                endpoints_of(self._folder)  # says what is wrong
        self._lock = threading.RLock()
        self._start = (False, 0)
        """The start of the run that the client belongs to: (is over, lock time). Another start needs a new client."""
        self._client: BufferClient | None = None
        self._page = ""
        self._view: Command | None = None
        self._end_view: weakref.finalize | None = None

    def __enter__(self) -> Run:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the view and the connections."""
        self.close()

    def __repr__(self) -> str:
        """Return the run's name or URL, without a request."""
        if self.path is None:
            return f"tba.Run(url={self._url!r})"
        return f"<tba.Run {self.path.name!r} in {self.path.parent}, {'over' if self.is_over else 'in progress'}>"

    @property
    def path(self) -> Path | None:
        """The run folder; None: the run is elsewhere."""
        return None if self._folder is None else self._folder.path

    @property
    def is_over(self) -> bool:
        """Whether nothing works on the run any more: it is done, has failed, was stopped or killed."""
        if self._folder is not None:
            return self._folder.has_begun and not self._folder.is_in_use
        return self.info.state in OVER

    @property
    def client(self) -> BufferClient:
        """The client of the buffer service, with every call of docs/api.md, also calls that steer a run in progress.

        It is opened at the first call, and again if the run has ended or was started since.

        Raises:
            ConfigError: the run is starting or ending right now; or as `tba view`.
            ChildError: the view of a run that is over could not be started.

        Examples:
            >>> run.client.export_rollouts(Path("scored.parquet"), status="scored")
        """
        with self._lock:
            folder = self._folder
            start = is_over, _ = (False, 0) if folder is None else (self.is_over, folder.locked_at_ns)
            view_died = self._view is not None and not self._view.is_running
            if self._client is None or start != self._start or view_died:
                self.close()
                if is_over:
                    self._client, self._page = self._open_view()
                elif self._url is None:
                    flags = {"run": None, "run_dir": str(self.path), "url": None, "token_file": None}
                    self._client, self._page = open_target(argparse.Namespace(**flags, ca_file=self._ca_file))
                else:
                    self._client = BufferClient(self._url, token=self._token, retry_s=RETRY_S, ca_file=self._ca_file)
                    self._page = page_url(self._url, self._token)
                self._start = start
            return self._client

    def close(self) -> None:
        """Close the view and the connections; a later call opens them again."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            if self._end_view is not None:
                self._end_view()
            self._client = self._view = self._end_view = None

    @property
    def info(self) -> RunInfo:
        """State, versions, components, waits and evaluations, as they are now."""
        return self.client.run()

    def summary(self) -> RunSummary:
        """Return the state of the run by its numbers, with its evidence and a remedy, in sentences."""
        return self.client.summary()

    def view(self) -> str:
        """Return the address of the page of the run. It holds a token: show it to nobody who may not steer the run."""
        with self._lock:
            _ = self.client
            return self._page

    def metrics(self) -> dict[str, list[Any]]:
        """Return the metrics of every step of the active history, as {column: values}, all of the same length.

        Columns are `step`, `at_s` (Unix seconds), and every metric (docs/trainer.md); None: the step lacks the value.

        Examples:
            >>> pandas.DataFrame(run.metrics()).plot(x="step", y="reward_mean")
        """
        client = self.client
        info, lineage = client.run(), None
        columns: dict[str, list[Any]] = {}
        # a resume meanwhile has abandoned some of the steps that were read
        while lineage != info.lineage:
            lineage, columns = info.lineage, {"step": [], "at_s": []}
            for first in range(1, info.step + 1, STEPS_PER_PAGE):
                last = min(first + STEPS_PER_PAGE - 1, info.step)
                curves = client.curves(from_step=first, to_step=last, max_points=STEPS_PER_PAGE)
                num_before, unknown = len(columns["step"]), [None] * len(curves.steps)
                page = {**curves.values, "step": curves.steps, "at_s": curves.at_s}
                for name in dict.fromkeys([*columns, *page]):
                    columns.setdefault(name, [None] * num_before).extend(page.get(name) or unknown)
            info = client.run()
        return columns

    def rollouts(
        self, *, order: RolloutOrder = "oldest", text_chars: int = MAX_TEXT_CHARS, **filters: Unpack[RolloutFilters]
    ) -> Iterator[RolloutInfo]:
        """Yield the stored rollouts that match, read page by page.

        Args:
            order: oldest, newest, best or worst.
            text_chars: longer texts are cut (at most 10,000); `client.get_rollout(id)` and exports have the whole ones.
            filters: prompt_id, task, version, from_version, to_version, status, min_reward, max_reward, searcher_id,
                finish_reason, environment, stop_condition, failure_boundary, contains.

        Examples:
            >>> for rollout in itertools.islice(run.rollouts(order="best", task="addition"), 3):
            ...     print(rollout.reward, rollout.prompt_text, rollout.response_text)
        """
        cursor: str | None = None
        while True:
            page = self.client.list_rollouts(
                order=order, limit=MAX_PER_PAGE, cursor=cursor, text_chars=text_chars, **filters
            )
            yield from page.rollouts
            cursor = page.next
            if cursor is None:
                return

    def _open_view(self) -> tuple[BufferClient, str]:
        view = Command(["--json", "view", str(self.path), "--no-open"])
        try:
            line = view.next_line()
            if not line:
                raise view.failure(view.wait())
            page: str = json.loads(line)["url"]
        except BaseException:
            view.close()
            raise
        self._view = view
        # also when the interpreter ends, or nobody holds the run any more
        self._end_view = weakref.finalize(self, view.close)
        url, _, token = page.partition(TOKEN_MARK)
        return BufferClient(url, token=unquote(token), retry_s=RETRY_S), page
