"""The run that a command talks to (a URL, a run folder, or the newest run under runs/), and the token for it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from tba.api import SnapshotInfo
from tba.clients import BufferClient
from tba.errors import ConfigError, ServiceError, WaitTimeoutError
from tba.tokens import operator_client_token
from tba_cli.run_folder import MARKER, RunFolder

RUNS_DIR = Path("runs")
RETRY_S = 3.0
POLL_S = 0.3
SILENCE_S = 300.0
TOKEN_MARK = "#token="
MAX_NAMED = 10
"""Most other runs that an error about a missing run names, the newest first."""


def open_client(args: argparse.Namespace) -> BufferClient:
    """Return a client for the buffer service that the target flags name."""
    return open_target(args)[0]


def open_target(args: argparse.Namespace) -> tuple[BufferClient, str]:
    """Return a client as `open_client` does, and the URL of the run's web page, which contains the client's token."""
    url, tokens_file, ca_file = (args.url, None, None) if args.url else endpoints_of(run_folder(args))
    token = operator_client_token(args.token_file or tokens_file)
    client = BufferClient(url, token=token, retry_s=RETRY_S, ca_file=args.ca_file or ca_file)
    return client, page_url(url, None if token is None else token.value[0])


class Page(NamedTuple):
    """The web page of a run."""

    url: str
    """The address with the token, if there is one."""
    token_file: str | None
    """The file that holds the token; `-`: stdin; None: no file."""

    @property
    def address(self) -> str:
        """The address without the token."""
        return self.url.partition(TOKEN_MARK)[0]


def page_url(buffer_url: str, token: str | None) -> str:
    """Return the address of a run's web page. The token is behind `#`, which browsers do not send to servers."""
    return f"{buffer_url.rstrip('/')}/" + ("" if token is None else f"{TOKEN_MARK}{quote(token, safe='')}")


def ended_run(args: argparse.Namespace) -> RunFolder | None:
    """Return the folder of the chosen run if it is a local run that is over or was killed, else None."""
    if args.url:
        return None
    folder = run_folder(args)
    # the lock and not a file: a supervisor that was killed leaves its files behind
    return folder if folder.has_begun and not folder.is_in_use else None


def run_folder(args: argparse.Namespace) -> RunFolder:
    """Return the folder of the local run that the target flags name."""
    if args.run_dir or args.run is not None:
        # a path is taken as it is, a name is below runs/
        folder = RunFolder(Path(args.run_dir or (args.run if "/" in args.run else RUNS_DIR / args.run)))
    elif going := [RunFolder(path.parent) for path in RUNS_DIR.glob("*/endpoints.json")]:
        # the file of a run that was killed is still there, so the lock counts first
        folder = max(going, key=lambda one: (one.is_in_use, one.endpoints_path.stat().st_mtime))
    elif ended := [RunFolder(path.parent) for path in RUNS_DIR.glob("*/recipe.json")]:
        folder = max(ended, key=lambda one: one.recipe_path.stat().st_mtime)
    else:
        raise ConfigError(f"no run is in progress under {RUNS_DIR}/; start one with `tba run RECIPE`, or give --url")
    folder.check_entries()
    return folder


def endpoints_of(folder: RunFolder) -> tuple[str, str | None, str | None]:
    """Return (buffer URL, tokens file, file of trusted authorities) of a run in progress."""
    path = folder.endpoints_path
    if not folder.path.is_dir():
        raise ConfigError(
            f"there is no run {folder.path.name!r}: {folder.path} does not exist, and the runs beside it are: "
            f"{runs_beside(folder.path)}; name one of them, give --run-dir DIR or --url URL, or start one with "
            "`tba run RECIPE`"
        )
    if not folder.is_in_use:
        raise ConfigError(f"run {folder.path.name!r} is not in progress; start it, or give --url")
    try:
        # else a token of the reader would be sent to an address that somebody else has written there
        if path.stat().st_uid != os.geteuid():
            raise ConfigError(f"{path} belongs to another user; give --url and --token-file")
        endpoints = json.loads(path.read_bytes())
        return endpoints["buffer_url"], endpoints["tokens_file"], endpoints.get("ca_file")
    except FileNotFoundError:
        raise ConfigError(
            f"run {folder.path.name!r} is starting or ending: {path} does not exist; try again, or give --url"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); give --url") from None


def runs_beside(folder: Path) -> str:
    """Return the names of the runs in the parent of a run's folder, the newest first; "none" if there are none."""
    markers = sorted(folder.parent.glob(f"*/{MARKER}"), key=lambda path: path.stat().st_mtime, reverse=True)
    names = [path.parent.name for path in markers[:MAX_NAMED]]
    return ", ".join(names) + (", ..." if len(markers) > MAX_NAMED else "") if names else "none"


def save_snapshot(client: BufferClient, name: str) -> SnapshotInfo:
    """Save the buffer of a run in progress as a snapshot, wait until it is saved, and print progress to stderr.

    Raises:
        ConflictError: a snapshot of this name exists, or the buffer saves or loads another one.
        ServiceError: the save failed.
        WaitTimeoutError: nothing was written for SILENCE_S.
    """
    info, moved_s = client.save_snapshot(name), time.monotonic()
    while info.state == "saving":
        time.sleep(POLL_S)
        before, info = info, client.get_snapshot(name)
        # any change counts as progress: rollouts, files or the state
        if info != before:
            moved_s = time.monotonic()
            if info.state == "saving":
                print(f"{info.num_written} rollouts written, {info.num_rollouts} stored", file=sys.stderr, flush=True)
        elif time.monotonic() - moved_s > SILENCE_S:
            raise WaitTimeoutError(f"wait 'snapshot-save': nothing was written for {SILENCE_S:.0f} s, see `tba status`")
    if info.state == "failed":
        raise ServiceError(f"snapshot {info.source} was not saved: {info.reason}")
    return info
