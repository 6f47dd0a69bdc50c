"""`tba weights list|gc`: the weight versions that the store of a run has, and why they are kept."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable

from tba.api import RunInfo
from tba.config import Recipe
from tba.errors import ConfigError, MalformedError, ObjectNotFoundError, TbaError
from tba.fields import escape_controls
from tba.store import ObjectStore, open_store
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions, checkpoint_prefix, complete_versions, incomplete_versions
from tba.weights.retention import reasons_to_keep
from tba_cli.commands.config import size_text
from tba_cli.commands.export import recipe_of
from tba_cli.commands.rollouts import with_run
from tba_cli.run_target import run_folder

ANY_LINEAGE = 10**9
"""Greater than every lineage."""


class VersionStore:
    """The object store of the run that the target flags name; it needs no service of the run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.recipe: Recipe = recipe_of(args)
        self.run = self.recipe.run.name
        self.prefix = f"runs/{self.run}/weights/"
        """Beginning of the keys of all versions."""
        self.store: ObjectStore = open_store(self.recipe.store)
        self.versions = WeightVersions(self.store, self.run)

    def reasons(self, existing: Iterable[PolicyVersion], info: RunInfo | None) -> dict[PolicyVersion, list[str]]:
        """Return the reasons to keep each version, by the trainer's rule; a version without any may be deleted."""
        return reasons_to_keep(
            existing,
            info,
            complete_versions(self.store, checkpoint_prefix(self.run)),
            keep=self.recipe.trainer.keep_versions,
            needed_by=self.versions.needed_by,
        )

    def num_bytes(self, version: PolicyVersion) -> int:
        """Return the total bytes of the objects of a version, complete or not."""
        keys = self.store.list(f"{self.prefix}{version}/")
        return sum(self.store.size_bytes(key) or 0 for key in keys)


def _is_store_alone(args: argparse.Namespace) -> bool:
    return args.recipe is not None and not (args.url or args.run_dir or args.run)


def _ask(args: argparse.Namespace) -> RunInfo:
    """Return the state of the run from its buffer service, or from a read-only buffer over an ended run's files.

    Raises:
        TbaError: no buffer can be asked.
    """
    if _is_store_alone(args):
        raise ConfigError("--recipe alone names no buffer service")
    return with_run(args, lambda client: client.run())


def _check_run(info: RunInfo, place: VersionStore) -> None:
    # with --url, recipe and service are named apart from each other
    if info.run != place.run:
        raise ConfigError(f"the recipe is that of run {place.run!r}, but the buffer service is that of {info.run!r}")


# ---- List -----------------------------------------------------------------------------------------------------------


def list_command(args: argparse.Namespace) -> int:
    """Print a line per version, oldest first, with its size and why it is kept."""
    place = VersionStore(args)
    existing = place.versions.versions()
    reasons, unknown, damaged = None, None, None
    try:
        info = _ask(args)
    except TbaError as error:
        unknown = str(error)
    else:
        _check_run(info, place)
        reasons = place.reasons(existing, info)
    listed = []
    for version in existing:
        try:
            manifest = place.versions.manifest(version)
        except ObjectNotFoundError:  # deleted meanwhile
            continue
        except MalformedError as error:  # show the others before it is raised
            damaged = MalformedError(f"version {version}: {error}")
            continue
        delta, adapter = manifest.delta, manifest.adapter
        kind = "adapter" if adapter else "full" if delta is None else "both" if manifest.is_full else "delta"
        stored_against = adapter or delta
        listed.append(
            {
                "version": manifest.version,
                "created_at_s": manifest.created_at_s,
                "kind": kind,
                "stored_bytes": sum(stored.size_bytes for stored in (*manifest.full, *manifest.changes)),
                "full_bytes": manifest.full_bytes,
                "base": None if stored_against is None else stored_against.base,
                "num_deltas": 0 if manifest.is_full or delta is None else delta.num_to_full,
                # None: nobody could be asked what is held. Empty: nothing needs it
                "kept": None if reasons is None else reasons.get(version, []),
            }
        )
    if args.json:
        print(json.dumps({"run": place.run, "unknown": unknown, "versions": listed}, indent=1))
    elif listed:
        row = "{:<9} {:<19} {:<7} {:>9} {:>9} {:>6} {:<9} {:>6}  {}"
        print(row.format("version", "published", "kind", "stored", "full", "ratio", "base", "deltas", "kept because"))
        for item in listed:
            cells = (
                item["version"],
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item["created_at_s"])),
                item["kind"],
                size_text(item["stored_bytes"]),
                size_text(item["full_bytes"]),
                f"{item['full_bytes'] / max(1, item['stored_bytes']):.3g}",
                item["base"] or "",
                item["num_deltas"],
                "unknown" if item["kept"] is None else "; ".join(item["kept"]) or "nothing needs it",
            )
            print(escape_controls(row.format(*cells)))
        print(f"{len(listed)} versions, {size_text(sum(item['stored_bytes'] for item in listed))} in the store")
        if unknown is not None:
            print(escape_controls(f"what holds them is unknown: {unknown}"))
    elif damaged is None:
        print(f"run {place.run!r} has published no version yet")
    if damaged is not None:
        raise damaged
    return 0


# ---- Delete ---------------------------------------------------------------------------------------------------------


def gc_command(args: argparse.Namespace) -> int:
    """Delete unneeded versions, newest first, since each is assembled from older ones; then delete incomplete ones."""
    place = VersionStore(args)
    # listed before the buffer is asked: what is published meanwhile is not touched
    existing = place.versions.versions()
    try:
        info = _ask(args)
    except TbaError as error:
        if not args.run_is_over:
            raise ConfigError(
                f"nothing was deleted, since nobody says which versions are held: {error}; if the run is over and will "
                "not be resumed, say --run-is-over"
            ) from None
        if not (_is_store_alone(args) or args.url) and run_folder(args).is_in_use:
            raise ConfigError(
                f"nothing was deleted: run {place.run!r} is in progress, and its buffer cannot be asked: {error}"
            ) from None
        info = None  # the run is over, and nobody can be asked
    if info is not None:
        _check_run(info, place)
    kept = place.reasons(existing, info)
    whole = [version for version in reversed(existing) if version not in kept]
    # a trainer may write one of its own lineage now; 0-0 stays, since publishing it again completes it
    lineage = info.lineage if info is not None else ANY_LINEAGE
    half = incomplete_versions(place.store, place.prefix, before_lineage=lineage, keep={START})
    verb = "would delete" if args.dry_run else "deleted"
    num_bytes: dict[PolicyVersion, int] = {}
    for version in (*whole, *half):
        num_bytes[version] = place.num_bytes(version)
        if not args.dry_run:
            place.versions.delete(version)
        if not args.json:
            what = f"what is left of {version}, which has no manifest" if version in half else str(version)
            print(f"{verb} {what}: {size_text(num_bytes[version])}", flush=True)
    if args.json:
        deleted = [
            {"version": str(version), "bytes": num_bytes[version], "is_incomplete": version in half}
            for version in num_bytes
        ]
        stay = {str(version): why for version, why in kept.items()}
        print(json.dumps({"run": place.run, "dry_run": args.dry_run, "deleted": deleted, "kept": stay}, indent=1))
        return 0
    print(f"{verb} {len(num_bytes)} versions, {size_text(sum(num_bytes.values()))}; {len(kept)} stay")
    if info is None and args.dry_run:
        print("which version was best is known to the buffer alone: export it before you delete")
    return 0
