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
from tba_cli.artifacts.rollout_dataset import DatasetFacts, Exported, exported, write_dataset
from tba_cli.commands.export import check_public, out_folder, write_whole
from tba_cli.commands.rollouts import MAX_PER_PAGE, filters_of, with_run
from tba_cli.run_target import run_folder

MAX_TEXT_CHARS = 10_000
"""Most characters of a text in a page; a rollout with a longer one is read by itself."""


def export_command(args: argparse.Namespace) -> int:
    """Write the rollouts that match, the oldest first, and print how many: to a file, or as a data set for the hub."""
    check_public(args)
    if args.push_to_hub is not None:
        return _push(args)
    if args.out is None:
        raise ConfigError("say where to: --out FILE, or --push-to-hub OWNER/NAME")
    path = Path(args.out)
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise ConfigError(f"--out {path} must end with {' or '.join(_WRITERS)}, which names the format")
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


def _push(args: argparse.Namespace) -> int:
    """Push a data set of the rollouts to the hub, and keep it in the folder of --out where there is one."""
    out, licence = out_folder(args.out), args.license
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("--push-to-hub needs pyarrow, which is not installed: pip install 'tba[data]'")
    repository = HubRepository(args.push_to_hub, "dataset")
    # before gigabytes are read
    repository.open(public=args.public)
    recipe = _recipe(args)
    filters = filters_of(args)

    def write(folder: Path) -> Exported:
        folder.mkdir()
        file = folder / "rollouts.parquet"

        def export(client: BufferClient) -> RunInfo:
            client.export_rollouts(file, **filters)
            return client.run()

        facts = DatasetFacts(run=with_run(args, export), recipe=recipe, filters=filters, licence=licence)
        names.append(facts.run.run)
        return write_dataset(file, folder, facts)

    names: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tba-export-") if out is None else nullcontext(out) as place:
        found = write_whole(Path(place), write)
        address = repository.push(
            Path(place), message=f"rollouts of run {names[0]!r}, exported by tba {tba.__version__}"
        )
    if args.json:
        print(json.dumps({"out": out and str(out), **_counts(found), "pushed_to": address}, indent=1))
        return 0
    print(f"pushed {_text(found)} to {address}" + ("" if out is None else f", and kept them in {out}"))
    return 0


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
    return f"{found.num_rollouts} rollouts{evicted}"


def _write_jsonl(client: BufferClient, path: Path, filters: RolloutFilters) -> Exported:
    """Write a RolloutInfo with whole texts per line; return how many.

    A page has what is stored when it is read, so only those that are evicted between their page and their text count as
    such.
    """
    part = path.with_name(path.name + ".part")
    num, num_evicted, cursor, is_whole = 0, 0, None, False
    try:
        with part.open("w", encoding="utf-8") as file:
            while not is_whole:
                page = client.list_rollouts(
                    order="oldest", limit=MAX_PER_PAGE, cursor=cursor, text_chars=MAX_TEXT_CHARS, **filters
                )
                for rollout in page.rollouts:
                    try:
                        whole = _with_whole_texts(client, rollout)
                    except NotFoundError:
                        num_evicted += 1
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
