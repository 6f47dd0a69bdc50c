"""`tba rollouts export`: stored rollouts as JSON Lines, as Parquet, or as a data set on the Hugging Face hub."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import tba
from tba.api import RolloutInfo, RunInfo
from tba.clients import BufferClient
from tba.clients.run_reader import RolloutFilters
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, NotFoundError
from tba_cli.artifacts.hub_upload import HubRepository
from tba_cli.artifacts.rollout_dataset import NO_ROLLOUTS, DatasetFacts, Exported, exported, write_dataset
from tba_cli.commands.export import check_public, out_folder, write_whole
from tba_cli.commands.rollouts import MAX_PER_PAGE, filters_of, with_run
from tba_cli.run_target import run_folder

MAX_TEXT_CHARS = 10_000
"""Most characters of a text in a page; a rollout with a longer one is read by itself."""


def export_command(args: argparse.Namespace) -> int:
    """Write the rollouts that match, the oldest first, and print how many: to a file, or as a data set."""
    check_public(args)
    if not args.out and args.push_to_hub is None:
        raise ConfigError("say where to: --out FILE, --out DIR, or --push-to-hub OWNER/NAME")
    if args.push_to_hub is not None or not Path(args.out).suffix:
        if args.force:
            raise ConfigError("--force replaces a file, and a data set is none; leave --force out")
        return _export_dataset(args)
    if args.license is not None:
        raise ConfigError("--license is that of a data set: --out DIR, or --push-to-hub OWNER/NAME")
    path = Path(args.out)
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise ConfigError(f"--out {path} must end with {' or '.join(_WRITERS)}, or be a folder, without a dot")
    if path.exists() and not args.force:
        raise ConfigError(f"{path} exists; give another --out, or --force to replace it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of --out {path} does not exist; make it first")
    found = with_run(args, lambda client: write(client, path, filters_of(args)))
    if args.json:
        document = {"out": str(path), **_counts(found), "num_bytes": path.stat().st_size}
        print(json.dumps(document, indent=1))
        return 0
    print(f"wrote {_text(found)} to {path}, {path.stat().st_size:,} bytes")
    return 0


def _export_dataset(args: argparse.Namespace) -> int:
    """Write a data set of the rollouts to the folder of --out, and push it to the hub, as far as that is asked for."""
    out, licence = out_folder(args.out), args.license
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("a data set needs pyarrow, which is not installed: pip install 'tba[data]'")
    repository = None if args.push_to_hub is None else HubRepository(args.push_to_hub, "dataset")
    recipe = _recipe(args)
    filters = filters_of(args)

    def write(folder: Path) -> Exported:
        folder.mkdir()
        file = folder / "rollouts.parquet"

        def export(client: BufferClient) -> RunInfo:
            info = client.run()
            if repository is not None and out is None:
                # once there is something to push, and before gigabytes are read that nothing would keep
                _check_any(client, filters)
                repository.open(public=args.public)
            client.export_rollouts(file, **filters)
            return info

        facts = DatasetFacts(run=with_run(args, export), recipe=recipe, filters=filters, licence=licence)
        names.append(facts.run.run)
        return write_dataset(file, folder, facts)

    names: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tba-export-") if out is None else nullcontext(out) as place:
        found = write_whole(Path(place), write)
        if out is not None and not args.json:
            print(f"wrote {_text(found)} to {out}", flush=True)
        address = None
        if repository is not None:
            if out is not None:
                repository.open(public=args.public)
            message = f"rollouts of run {names[0]!r}, exported by tba {tba.__version__}"
            address = repository.push(Path(place), message=message)
            if not args.json:
                print(f"pushed {_text(found)} to {address}")
    if args.json:
        print(json.dumps({"out": out and str(out), **_counts(found), "pushed_to": address}, indent=1))
    return 0


def _check_any(client: BufferClient, filters: RolloutFilters) -> None:
    """Raise ConfigError where no rollout matches."""
    cursor = None
    while True:  # a page may have none and not be the last: a request reads a bounded number
        page = client.list_rollouts(order="newest", limit=1, cursor=cursor, text_chars=0, **filters)
        if page.rollouts:
            return
        if page.next is None:
            raise ConfigError(NO_ROLLOUTS)
        cursor = page.next


def _recipe(args: argparse.Namespace) -> Recipe | None:
    """Return the recipe for the card; None: it is not here."""
    if args.recipe is not None:
        return load_recipe(args.recipe)
    folder = None if args.url else run_folder(args)
    return None if folder is None or not folder.has_begun else load_recipe(folder.recipe_path, environ={})


def _counts(found: Exported | None) -> dict[str, int | None]:
    if found is None:
        return {"num_rollouts": None, "num_evicted": None}
    return {"num_rollouts": found.num_rollouts, "num_evicted": found.num_evicted}


def _text(found: Exported | None) -> str:
    if found is None:
        return "the rollouts"
    evicted = f" ({found.num_evicted} more were evicted before they were read)" if found.num_evicted else ""
    if found.num_evicted is None:
        evicted = " (it is not known how many more were evicted before they were read; --out FILE.parquet counts them)"
    return f"{found.num_rollouts} rollouts{evicted}"


def _write_jsonl(client: BufferClient, path: Path, filters: RolloutFilters) -> Exported:
    """Write a RolloutInfo with whole texts per line; return how many.

    A page has what is stored when it is read, so of a run in progress nobody knows how many were evicted before.
    """
    part = path.with_name(path.name + ".part")
    num, cursor, is_whole = 0, None, False
    num_evicted = 0 if client.run().read_only else None
    try:
        with part.open("w", encoding="utf-8") as file:
            while not is_whole:
                page = client.list_rollouts(
                    order="oldest", limit=MAX_PER_PAGE, cursor=cursor, text_chars=MAX_TEXT_CHARS, **filters
                )
                for rollout in page.rollouts:
                    try:
                        whole = _with_whole_texts(client, rollout)
                    except NotFoundError:  # evicted
                        continue
                    file.write(whole.model_dump_json() + "\n")
                    num += 1
                cursor, is_whole = page.next, page.next is None
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return Exported(num, num_evicted)


def _with_whole_texts(client: BufferClient, rollout: RolloutInfo) -> RolloutInfo:
    # of the prompt nothing says that it is cut; its data is left out of a page where it is long
    is_cut = rollout.response_text_cut or len(rollout.prompt_text or "") >= MAX_TEXT_CHARS
    is_cut |= rollout.prompt_text is not None and rollout.prompt_data is None
    if not is_cut:
        return rollout
    detail = client.get_rollout(rollout.rollout_id)
    return RolloutInfo.model_validate(detail.model_dump(include=set(RolloutInfo.model_fields)))


def _write_parquet(client: BufferClient, path: Path, filters: RolloutFilters) -> Exported | None:
    """Write what the service makes; return how many rollouts it has, None where pyarrow is not here to count them."""
    client.export_rollouts(path, **filters)
    try:
        return exported(path)
    except ModuleNotFoundError:
        return None


_WRITERS: dict[str, Callable[[BufferClient, Path, RolloutFilters], Exported | None]] = {
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
