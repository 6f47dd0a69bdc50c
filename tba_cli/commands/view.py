"""`tba view` shows the page of a run in a browser; a run that is over is served from a copy of its files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence

from tba_cli.browser import BrowserPages
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import ended_run, open_target


def view_command(args: argparse.Namespace) -> int:
    """Print the address of each page and open it; serve the pages of runs that are over until Ctrl-C or SIGTERM."""
    pages = [_page(argparse.Namespace(**{**vars(args), "run": name})) for name in args.runs or [None]]
    with BrowserPages() as browser:
        _show(pages, args, browser)
    return 0


def _show(pages: Sequence[str | RunFolder], args: argparse.Namespace, browser: BrowserPages) -> None:
    ended = [page for page in pages if isinstance(page, RunFolder)]

    def show(served: list[str]) -> None:
        left = iter(served)
        # in the order in which the runs were named
        urls = [next(left) if isinstance(page, RunFolder) else page for page in pages]
        print(json.dumps({"urls": urls}) if args.json else "\n".join(urls), flush=True)
        if ended:
            print(f"read-only, from a copy of the files of {len(ended)} run(s); Ctrl-C ends it", file=sys.stderr)
        if not args.no_open and has_display(os.environ):
            for url in urls:
                browser.open(url)

    if not ended:
        show([])
        browser.wait_until_read()
        return
    from tba_cli.local.ended_run import serve_ended  # no image holds the launcher

    serve_ended(ended, port=args.port, show=show)


def _page(args: argparse.Namespace) -> str | RunFolder:
    """Return the address of the page of a run in progress, or the folder of one that is over."""
    folder = ended_run(args)
    if folder is not None:
        return folder
    client, url = open_target(args)
    try:
        # a wrong address or token is a sentence here, and an empty page in a browser
        client.run()
    finally:
        client.close()
    return url


def has_display(environ: Mapping[str, str]) -> bool:
    """Return whether a browser would open a window; in a terminal without one, a text browser would take it over."""
    return sys.platform != "linux" or any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
