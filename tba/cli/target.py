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


def open_client(args: argparse.Namespace) -> BufferClient:
    """A client for the buffer service that the target flags name.

    Raises:
        ConfigError: no such run, or none is going.
    """
    from tba.clients import BufferClient

    url, tokens_file, ca_file = (args.url, None, None) if args.url else _endpoints(args)
    token = operator_client_token(args.token_file or tokens_file)
    return BufferClient(url, token=token, retry_s=RETRY_S, ca_file=args.ca_file or ca_file)


def ended_run(args: argparse.Namespace) -> RunFolder | None:
    """The folder of the chosen run if that is a local run that is not going now; else None.

    Raises:
        ConfigError: no run is named, and none is going.
    """
    if args.url:
        return None
    folder = run_folder(args)
    return folder if folder.has_begun and not folder.endpoints_path.exists() else None


def run_folder(args: argparse.Namespace) -> RunFolder:
    """The folder of the local run that the target flags name.

    Raises:
        ConfigError: no run is named, and none is going.
    """
    from tba.local.run_folder import RunFolder

    return RunFolder(Path(args.run_dir) if args.run_dir else _folder_of(args.run))


def _endpoints(args: argparse.Namespace) -> tuple[str, str | None, str | None]:
    """(buffer URL, tokens file, file of trusted authorities) from the endpoints.json of the chosen run folder."""
    folder = run_folder(args).path
    path = folder / "endpoints.json"
    try:
        endpoints = json.loads(path.read_text())
        return endpoints["buffer_url"], endpoints["tokens_file"], endpoints.get("ca_file")
    except FileNotFoundError:
        raise ConfigError(f"run {folder.name!r} is not going: {path} does not exist; give --url, or start it") from None
    except (json.JSONDecodeError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); give --url") from None


def _folder_of(run: str | None) -> Path:
    if run is not None:
        return Path(run) if "/" in run else RUNS_DIR / run
    going = sorted(RUNS_DIR.glob("*/endpoints.json"), key=lambda path: path.stat().st_mtime)
    if not going:
        raise ConfigError(f"no run is going under {RUNS_DIR}/; start one with `tba run RECIPE`, or give --url")
    return going[-1].parent
