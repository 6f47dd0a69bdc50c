"""`tba view` shows the page of a run in a browser; a run that is over is served from a copy of its files."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack, closing

from tba_cli.browser import opened_page
from tba_cli.run_target import Page, ended_run, endpoints_of, open_target, run_folder

READ_S = 5.0
"""A browser that has to start first reads its file within this time."""


def view_command(args: argparse.Namespace) -> int:
    """Open the page in a browser and print its address without its token; that of a run that is over is served here."""
    ended = ended_run(args)
    # in a terminal without a window, a text browser would take it over
    has_display = sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    is_opened = has_display and not args.no_open
    with ExitStack() as stack:

        def show(page: Page) -> None:
            _print(page, args)
            if is_opened:
                stack.enter_context(opened_page(page.url))

        if ended is None:
            show(_page(args))
            time.sleep(READ_S * is_opened)
        else:
            from tba_cli.local.ended_run import serve_ended  # no image holds the launcher

            serve_ended(ended, port=args.port, show=show)
    return 0


def _print(page: Page, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"url": page.url}), flush=True)
        return
    # a terminal keeps what it has shown, and whoever has the token may steer the run
    print(page.address, flush=True)
    if page.url != page.address:
        where = "" if page.token_file is None else f" in {page.token_file}"
        print(
            f"where no browser opens, it asks for a token: that of the operator{where}; --json prints it too",
            file=sys.stderr,
        )


def _page(args: argparse.Namespace) -> Page:
    """Return the page of a run in progress."""
    client, url = open_target(args)
    with closing(client):
        # a wrong address or token is a sentence here, and an empty page in a browser
        client.run()
    return Page(url, args.token_file or (None if args.url else endpoints_of(run_folder(args))[1]))
