"""`tba rollouts export`: stored rollouts as JSON Lines or Parquet, from a run in progress or over."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tba.api import RolloutInfo
from tba.clients import BufferClient
from tba.clients.run_reader import RolloutFilters
from tba.errors import ConfigError, NotFoundError
from tba_cli.commands.rollouts import MAX_PER_PAGE, filters_of, with_run

MAX_TEXT_CHARS = 10_000
"""Most characters of a text in a page; a rollout with a longer one is read by itself."""


def export_command(args: argparse.Namespace) -> int:
    """Write the rollouts that match to a file, the oldest first, and print how many."""
    path = Path(args.out)
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise ConfigError(f"--out {path} must end with {' or '.join(_WRITERS)}, which names the format")
    if path.exists() and not args.force:
        raise ConfigError(f"{path} exists; give another --out, or --force to replace it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of --out {path} does not exist; make it first")
    num = with_run(args, lambda client: write(client, path, filters_of(args)))
    if args.json:
        document = {"out": str(path), "num_rollouts": num, "num_bytes": path.stat().st_size}
        print(json.dumps(document, indent=1))
        return 0
    what = "the rollouts" if num is None else f"{num} rollouts"
    print(f"wrote {what} to {path}, {path.stat().st_size:,} bytes")
    return 0


def _write_jsonl(client: BufferClient, path: Path, filters: RolloutFilters) -> int:
    """Write a RolloutInfo with whole texts per line; return how many."""
    part = path.with_name(path.name + ".part")
    num, cursor, is_whole = 0, None, False
    try:
        with part.open("w", encoding="utf-8") as file:
            while not is_whole:
                page = client.list_rollouts(
                    order="oldest", limit=MAX_PER_PAGE, cursor=cursor, text_chars=MAX_TEXT_CHARS, **filters
                )
                for rollout in page.rollouts:
                    # evicted meanwhile: left out, as those that were evicted a moment earlier
                    with suppress(NotFoundError):
                        file.write(_with_whole_texts(client, rollout).model_dump_json() + "\n")
                        num += 1
                cursor, is_whole = page.next, page.next is None
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return num


def _with_whole_texts(client: BufferClient, rollout: RolloutInfo) -> RolloutInfo:
    # of the prompt nothing says that it is cut; its data is left out of a page where it is long
    is_cut = rollout.response_text_cut or len(rollout.prompt_text or "") >= MAX_TEXT_CHARS
    is_cut |= rollout.prompt_text is not None and rollout.prompt_data is None
    if not is_cut:
        return rollout
    detail = client.get_rollout(rollout.rollout_id)
    return RolloutInfo.model_validate(detail.model_dump(include=set(RolloutInfo.model_fields)))


def _write_parquet(client: BufferClient, path: Path, filters: RolloutFilters) -> int | None:
    """Write what the service makes; return how many rollouts it has, None where pyarrow is not here to count them."""
    client.export_rollouts(path, **filters)
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        return None
    return parquet.read_metadata(path).num_rows


_WRITERS: dict[str, Callable[[BufferClient, Path, RolloutFilters], int | None]] = {
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
