"""Which run a command talks to: an URL, a run folder, or the newest run under runs/; and with which token."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tba.errors import ConfigError
from tba.tokens import operator_client_token

if TYPE_CHECKING:
    from tba.clients import BufferClient
    from tba.local.run_folder import RunFolder

RUNS_DIR = Path("runs")
RETRY_S = 3.0
MAX_NAMED = 10
"""So many runs are named to who asks for one that is not there, the newest first."""


def open_client(args: argparse.Namespace) -> BufferClient:
    """A client for the buffer service that the target flags name.

    Raises:
        ConfigError: no such run, or none is going.
    """
    from tba.clients import BufferClient

    url, tokens_file, ca_file = (args.url, None, None) if args.url else endpoints_of(run_folder(args))
    token = operator_client_token(args.token_file or tokens_file)
    return BufferClient(url, token=token, retry_s=RETRY_S, ca_file=args.ca_file or ca_file)


def ended_run(args: argparse.Namespace) -> RunFolder | None:
    """The folder of the chosen run if that is a local run that is over, also one that was killed;
    else None.

    Raises:
        ConfigError: no run is named, and none is going.
    """
    if args.url:
        return None
    folder = run_folder(args)
    return folder if folder.has_begun and not folder.is_in_use else None


def run_folder(args: argparse.Namespace) -> RunFolder:
    """The folder of the local run that the target flags name.

    Raises:
        ConfigError: no run is named, and none is going.
    """
    from tba.local.run_folder import RunFolder

    return RunFolder(Path(args.run_dir) if args.run_dir else _folder_of(args.run))


def endpoints_of(folder: RunFolder) -> tuple[str, str | None, str | None]:
    """(buffer URL, tokens file, file of trusted authorities) of a run that is going.

    Raises:
        ConfigError: it never began, is over, also where it was killed, or just starts or ends.
    """
    path = folder.endpoints_path
    if not folder.path.is_dir():
        raise ConfigError(_no_such_run(folder.path))
    if not folder.is_in_use:
        raise ConfigError(f"run {folder.path.name!r} is not going; start it, or give --url")
    try:
        endpoints = json.loads(path.read_text())
        return endpoints["buffer_url"], endpoints["tokens_file"], endpoints.get("ca_file")
    except FileNotFoundError:
        raise ConfigError(
            f"run {folder.path.name!r} is starting or ending: {path} does not exist; try again, or give --url"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); give --url") from None


def _no_such_run(folder: Path) -> str:
    """A sentence about a run that never began: which there are, and what to do."""
    from tba.local.run_folder import MARKER

    markers = sorted(folder.parent.glob(f"*/{MARKER}"), key=lambda path: path.stat().st_mtime, reverse=True)
    names = [path.parent.name for path in markers[:MAX_NAMED]]
    there = ", ".join(names) + (", ..." if len(markers) > MAX_NAMED else "") if names else "none"
    return (
        f"there is no run {folder.name!r}: {folder} does not exist, and the runs beside it are: {there}; name one of "
        "them, give --run-dir DIR or --url URL, or start one with `tba run RECIPE`"
    )


def _folder_of(run: str | None) -> Path:
    if run is not None:
        return Path(run) if "/" in run else RUNS_DIR / run
    from tba.local.run_folder import RunFolder

    going = [RunFolder(path.parent) for path in RUNS_DIR.glob("*/endpoints.json")]
    if going:  # of a run that was killed the file is still there
        return max(going, key=lambda folder: (folder.is_in_use, folder.endpoints_path.stat().st_mtime)).path
    ended = [RunFolder(path.parent) for path in RUNS_DIR.glob("*/recipe.json")]
    if not ended:
        raise ConfigError(f"no run is going under {RUNS_DIR}/; start one with `tba run RECIPE`, or give --url")
    return max(ended, key=lambda folder: folder.recipe_path.stat().st_mtime).path
