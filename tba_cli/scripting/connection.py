"""Who answers for a run: the buffer service while it is in progress, a read-only view of its files when it is over."""

from __future__ import annotations

import argparse
import json
import os
import threading
import weakref
from urllib.parse import unquote

from tba.clients import BufferClient
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import RETRY_S, TOKEN_MARK, endpoints_of, open_target, page_url, run_folder
from tba_cli.scripting.command import Command


class Connection:
    """Opens a client at the first call, and again where the run has ended or was started since. Safe for threads.

    Args:
        name: a name below runs/ or a path; None: the newest run.
        url: of a buffer service elsewhere, instead of a name.
        token: for `url`.
        ca_file: PEM file of the authorities that are trusted for an https URL.

    Raises:
        ConfigError: there is no such run.
    """

    def __init__(
        self,
        name: str | os.PathLike[str] | None,
        *,
        url: str | None,
        token: str | None,
        ca_file: str | None,
    ) -> None:
        run = None if name is None else os.fspath(name)
        target = argparse.Namespace(run=run, run_dir=None, url=url, token_file=None, ca_file=ca_file)
        self.folder: RunFolder | None = None if url else run_folder(target)
        self.url, self._token = url, token
        if self.folder is not None:
            if not self.folder.has_begun:
                endpoints_of(self.folder)  # says what is wrong
            target.run, target.run_dir = None, str(self.folder.path)
        self._target = target
        self._lock = threading.Lock()
        self._start = (False, 0)
        """Which start of the run the client is for: a client of another one is of no use."""
        self._client: BufferClient | None = None
        self._page = ""
        self._view: Command | None = None
        self._end_view: weakref.finalize | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is a local run that is over, or was killed."""
        return self.folder is not None and self.folder.has_begun and not self.folder.is_in_use

    def client(self) -> BufferClient:
        """Return a client.

        Raises:
            ConfigError: the run is starting or ending right now; or as `tba view`.
            ChildError: the view of a run that is over could not be started.
        """
        with self._lock:
            return self._opened()

    def page(self) -> str:
        """Return the address of the page of the run, with a token; raises as `client`."""
        with self._lock:
            self._opened()
            return self._page

    def close(self) -> None:
        """End the view and the connections; the next call opens them again."""
        with self._lock:
            self._close()

    def _opened(self) -> BufferClient:
        start = is_over, _ = self.is_over, 0 if self.folder is None else self.folder.locked_at_ns
        view_died = self._view is not None and not self._view.is_running
        if self._client is None or start != self._start or view_died:
            self._close()
            self._client, self._page = self._open_view() if is_over else self._open_service()
            self._start = start
        return self._client

    def _open_service(self) -> tuple[BufferClient, str]:
        if self.url is None:
            return open_target(self._target)
        client = BufferClient(self.url, token=self._token, retry_s=RETRY_S, ca_file=self._target.ca_file)
        return client, page_url(self.url, self._token)

    def _open_view(self) -> tuple[BufferClient, str]:
        assert self.folder is not None, "only a local run is over"
        view = Command(["--json", "view", str(self.folder.path), "--no-open"])
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

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._end_view is not None:
            self._end_view()
        self._client = self._view = self._end_view = None
