"""What a read-only buffer shows: a run that is over, by a copy of its Redis files, or a snapshot of a run."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.config import Recipe, load_recipe, parse_recipe
from tba.config.sections import StoreSection
from tba.errors import ConfigError, MalformedError, ObjectNotFoundError
from tba.store import ObjectStore, open_store
from tba.wire.snapshot_manifest import SnapshotSource, decode_snapshot_manifest, snapshot_names
from tba_cli.reports.history import load_end
from tba_cli.resolve import absolute_store_url
from tba_cli.run_folder import RunFolder, num_plain_bytes
from tba_cli.run_target import endpoints_of, run_folder, snapshot_name

LOOPBACK = "127.0.0.1"
MAX_NAMED = 10
"""An error about a snapshot names at most this many others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown."""

    name: str
    recipe: Recipe
    """Of the read-only buffer: on loopback, with tokens of its own, over the run's store."""
    num_bytes: int
    """Size of what is copied or loaded."""
    files: RunFolder | None = None
    """The run whose Redis files are copied; None: `run.snapshot` is loaded."""
    others: str = ""
    """Sentence that names the snapshots that exist."""

    def at_port(self, port: int) -> Recipe:
        """Return the recipe with the port of the page; 0: a free one."""
        document = self.recipe.model_dump(mode="json")
        document["buffer"]["port"] = port
        return parse_recipe(document, where=self.name)


def view_of(args: argparse.Namespace) -> View:
    """Return what the target flags name: a snapshot, or a run that is over.

    Raises:
        ConfigError: there is no such run or snapshot, or its files are not there.
    """
    name = snapshot_name(args)
    if name is None:
        return ended_view(run_folder(args))
    if args.url:
        raise ConfigError(
            "--snapshot is read from the object store, and not from a buffer service: leave out --url, and give the "
            "recipe of the run with --recipe"
        )
    if args.recipe is not None:
        if args.run or args.run_dir:
            raise ConfigError("--recipe stands in place of a run here: give one of the two")
        recipe = load_recipe(args.recipe)
        return snapshot_view(name, recipe, RunFolder(Path(recipe.local.runs_dir) / recipe.run.name))
    folder = run_folder(args)
    if not folder.has_begun:
        endpoints_of(folder)  # says what is wrong
        raise ConfigError(f"no run began in {folder.path}; name another one, or give its recipe with --recipe")
    return snapshot_view(name, _recipe_of(folder), folder)


def ended_view(folder: RunFolder) -> View:
    """Return the view of a run that is over.

    Raises:
        ConfigError: its files are not there.
    """
    if not folder.redis_path.is_dir():
        raise ConfigError(f"the buffer of {folder.path.name!r} is gone: {folder.redis_path} does not exist")
    end, recipe = load_end(folder), _recipe_of(folder)
    # requests to an endpoint that the folder names would be signed with the keys of the reader
    own = StoreSection(url=recipe.store.url, region=recipe.store.region)
    recipe = recipe.model_copy(update={"store": StoreSection() if recipe.store.endpoint_url else own})
    return View(
        name=recipe.run.name,
        recipe=_read_only(recipe, folder, f"this run is over since {_at(end.at_s)}: {end.reason}", {}),
        num_bytes=num_plain_bytes(folder.redis_path),
        files=folder,
    )


def snapshot_view(name: str, recipe: Recipe, folder: RunFolder) -> View:
    """Return the view of a snapshot.

    Args:
        name: NAME of this run, or RUN/NAME in its store.
        recipe: of the run.
        folder: of the run; it need not exist.

    Raises:
        ConfigError: the snapshot is not there, or its manifest is damaged; names those that exist.
        StoreError: the store cannot be read.
    """
    source = SnapshotSource.parse(name if "/" in name else f"{recipe.run.name}/{name}")
    store = open_store(recipe.store.model_copy(update={"url": absolute_store_url(recipe.store.url, folder)}))
    others = _others(store, source.run)
    try:
        manifest = decode_snapshot_manifest(store.get(source.manifest_key), key=source.manifest_key)
    except ObjectNotFoundError:
        raise ConfigError(f"there is no snapshot {source} in {store.url}; {others}") from None
    except MalformedError as error:
        raise ConfigError(f"{error}; {others}") from None
    why = (
        f"snapshot {source} of {_at(manifest.created_at_s)}: it holds rollouts and prompts, and no curves, evaluations "
        "or ledger"
    )
    run = {"name": source.run, "snapshot": str(source), "fork_version": None}
    return View(
        name=source.run,
        recipe=_read_only(recipe, folder, why, run),
        num_bytes=sum(stored.size_bytes for stored in manifest.objects),
        others=others,
    )


def _others(store: ObjectStore, run: str) -> str:
    names = snapshot_names(store, run)
    more = ", ..." if len(names) > MAX_NAMED else ""
    listed = ", ".join(names[:MAX_NAMED]) + more if names else "none (`tba buffer save NAME` makes one)"
    return f"the snapshots of run {run!r} there are: {listed}"


def _recipe_of(folder: RunFolder) -> Recipe:
    return load_recipe(folder.recipe_path, environ={})


def _read_only(recipe: Recipe, folder: RunFolder, why: str, run: dict[str, Any]) -> Recipe:
    # A run folder may be of somebody else: what a recipe can have started, imported, read or called stays out, and the
    # Redis, the addresses, the tokens and the certificates are the reader's own.
    document = recipe.model_dump(mode="json")
    document["run"] |= run
    document["buffer"] |= {"host": LOOPBACK, "port": 0, "read_only": why[:1000]}
    # a run in progress may have its port
    document["reward"] |= {"host": LOOPBACK, "port": 0}
    document["local"] = {name: document["local"][name] for name in ("start_timeout_s", "stop_timeout_s")}
    document |= {"auth": {}, "tls": {}, "scaling": {}}
    document["store"]["url"] = absolute_store_url(document["store"]["url"], folder)
    return parse_recipe(document, where=str(folder.recipe_path))


def _at(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
