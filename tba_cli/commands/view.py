"""`tba view` and `tba runs`: show the page of a run, or the list of the runs of a folder, in a browser."""

from __future__ import annotations

import argparse
import html
import json
import os
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tba_cli.run_target import RUNS_DIR, Page, ended_run, endpoints_of, open_target, run_folder

REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>tba</title>\n'
    '<meta http-equiv="refresh" content="0; url={url}">\n'
    '<p><a href="{url}">the page of the run</a></p>\n'
)
READ_S = 5.0
"""Seconds after which the redirect file is deleted; a browser has to start and read it before."""


def view_command(args: argparse.Namespace) -> int:
    """Print the page's address (with its token only for --json) and open it in a browser; serve it if the run ended."""
    is_list = not (getattr(args, "run", None) or args.run_dir or args.url)
    ended = None if is_list else ended_run(args)
    # in a terminal without a window, a text browser would take it over
    has_display = sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    is_opened = has_display and not args.no_open
    with ExitStack() as stack:

        def show(page: Page) -> None:
            if args.json:
                print(json.dumps({"url": page.url}), flush=True)
            else:
                # a terminal keeps what it has shown, and whoever has the token may steer the run
                print(page.address, flush=True)
            if not args.json and page.url != page.address:
                where = "" if page.token_file is None else f" in {page.token_file}"
                print(
                    f"where no browser opens, it asks for a token: that of the operator{where}; --json prints it too",
                    file=sys.stderr,
                )
            if is_opened:
                stack.enter_context(opened_page(page.url))

        if is_list:
            from tba_cli.scripting.runs_page import serve_runs

            serve_runs(Path(getattr(args, "folder", RUNS_DIR)), port=args.port, show=show)
        elif ended is None:
            client, url = open_target(args)
            with closing(client):
                # a wrong address or token is a sentence here, and an empty page in a browser
                client.run()
            show(Page(url, args.token_file or (None if args.url else endpoints_of(run_folder(args))[1])))
            time.sleep(READ_S * is_opened)
        else:
            from tba_cli.local.ended_run import serve_ended  # no image holds the launcher

            serve_ended(ended, port=args.port, show=show)
    return 0


@contextmanager
def opened_page(url: str) -> Iterator[None]:
    """Open an address in a browser through a redirect file that only this user can read; delete it after the block.

    The address holds a token, and other users can see the arguments of the browser's process.
    """
    with tempfile.TemporaryDirectory(prefix="tba-view-") as folder:
        path = Path(folder) / "page.html"
        # the mode from the first byte on
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(REDIRECT.format(url=html.escape(url)))
        webbrowser.open(path.as_uri())
        yield
