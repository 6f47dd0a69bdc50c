"""`tba weights list|show|pin|unpin|gc`: the weight versions that the store of a run has, and why they are kept."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tba.api import RunInfo
from tba.config import Recipe
from tba.errors import ConfigError, MalformedError, ObjectNotFoundError, TbaError
from tba.fields import escape_controls
from tba.store import ObjectStore, open_store
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions, checkpoint_prefix, complete_versions, incomplete_versions
from tba.weights.export import RunFacts
from tba.weights.retention import reasons_to_keep
from tba.wire.weight_manifest import Manifest
from tba_cli.commands.config import size_text
from tba_cli.commands.export import Exportable, choose, recipe_of, source_of
from tba_cli.run_target import ended_run, open_client, run_folder

NUM_LARGEST = 5
"""So many tensors does `tba weights show` name."""
ANY_LINEAGE = 10**9
"""Greater than every lineage."""


@dataclass(frozen=True, slots=True)
class VersionStore:
    """The store of one run, whether a service of the run is there or not."""

    recipe: Recipe
    store: ObjectStore
    versions: WeightVersions

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.recipe.run.name

    def reasons(self, existing: Iterable[PolicyVersion], info: RunInfo | None) -> dict[PolicyVersion, list[str]]:
        """Return why versions are kept, by the rule of the trainer; one that is not there may be deleted."""
        return reasons_to_keep(
            existing,
            info,
            complete_versions(self.store, checkpoint_prefix(self.run)),
            keep=self.recipe.trainer.keep_versions,
            pinned=self.versions.pinned(),
            needed_by=self.versions.needed_by,
        )

    @property
    def prefix(self) -> str:
        """What the keys of all versions begin with."""
        return f"runs/{self.run}/weights/"

    def num_bytes(self, version: PolicyVersion) -> int:
        """Return the bytes of the objects under the name of a version, whether it is whole or not."""
        keys = self.store.list(f"{self.prefix}{version}/")
        return sum(self.store.size_bytes(key) or 0 for key in keys)


def open_versions(args: argparse.Namespace) -> VersionStore:
    """Return the store of the run that the target flags name; no service is asked.

    Raises:
        ConfigError: there is no such run.
    """
    recipe = recipe_of(args)
    store = open_store(recipe.store)
    return VersionStore(recipe, store, WeightVersions(store, recipe.run.name))


def chosen(args: argparse.Namespace, words: Sequence[str], place: VersionStore) -> list[PolicyVersion]:
    """Return the versions that words name (see `choose`); the run is asked only for words that need it.

    Raises:
        ConfigError: there is no such version.
    """
    is_alone = _is_store_alone(args) or all(is_version(word) for word in words)
    source = Exportable(facts=RunFacts(recipe=place.recipe)) if is_alone else source_of(args)
    return [choose(word, source, place.versions) for word in words]


def is_version(word: str) -> bool:
    """Return whether a word is LINEAGE-STEP."""
    try:
        PolicyVersion.parse(word)
    except MalformedError:
        return False
    return True


def _is_store_alone(args: argparse.Namespace) -> bool:
    return args.recipe is not None and not (args.url or args.run_dir or args.run)


def _ask(args: argparse.Namespace, place: VersionStore) -> RunInfo:
    """Return the run as its buffer knows it: the service, or a read-only one over the files of a run that is over.

    Raises:
        TbaError: nobody can be asked.
    """
    if _is_store_alone(args):
        raise ConfigError("--recipe alone names no buffer service")
    if (folder := ended_run(args)) is not None:
        # no image holds the launcher
        from tba_cli.local.ended_run import read_ended

        info = read_ended(folder, lambda client: client.run())
    else:
        client = open_client(args)
        try:
            info = client.run()
        finally:
            client.close()
    return info


def _check_run(info: RunInfo, place: VersionStore) -> None:
    # with --url, recipe and service are named apart from each other
    if info.run != place.run:
        raise ConfigError(f"the recipe is that of run {place.run!r}, but the buffer service is that of {info.run!r}")


# ---- List and show --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedVersion:
    """One line of the list."""

    version: str
    created_at_s: float
    kind: str
    """full, delta or both."""
    stored_bytes: int
    full_bytes: int
    base: str | None
    """The version that the delta is against."""
    num_deltas: int
    """To apply from the nearest full version; 0: it is full itself."""
    pinned: str | None
    kept: list[str] | None
    """Why it is kept; None: nobody could be asked what is held. Empty: nothing needs it."""


def list_command(args: argparse.Namespace) -> int:
    """Print a line per version, oldest first."""
    place = open_versions(args)
    existing, pinned = place.versions.versions(), place.versions.pinned()
    reasons, unknown, damaged = None, None, None
    try:
        info = _ask(args, place)
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
            damaged = error
            continue
        listed.append(_listed(manifest, pinned.get(version), None if reasons is None else reasons.get(version, [])))
    if args.json:
        print(json.dumps({"run": place.run, "unknown": unknown, "versions": list(map(asdict, listed))}, indent=1))
    elif listed:
        print("\n".join(list_lines(listed)))
        if unknown is not None:
            print(escape_controls(f"what holds them is unknown: {unknown}"))
    elif damaged is None:
        print(f"run {place.run!r} has published no version yet")
    if damaged is not None:
        raise damaged
    return 0


def _listed(manifest: Manifest, pinned: str | None, kept: list[str] | None) -> ListedVersion:
    return ListedVersion(
        version=manifest.version,
        created_at_s=manifest.created_at_s,
        kind=kind_of(manifest),
        stored_bytes=_stored_bytes(manifest),
        full_bytes=manifest.full_bytes,
        base=_base_text(manifest),
        num_deltas=0 if manifest.is_full or manifest.delta is None else manifest.delta.num_to_full,
        pinned=pinned,
        kept=kept,
    )


def kind_of(manifest: Manifest) -> str:
    """Return how a version is stored: full, delta, both (of these), or adapter."""
    if manifest.adapter is not None:
        return "adapter"
    if manifest.delta is None:
        return "full"
    return "both" if manifest.is_full else "delta"


def _base_text(manifest: Manifest) -> str | None:
    if manifest.adapter is not None:
        return manifest.adapter.base
    return None if manifest.delta is None else manifest.delta.base


def _stored_bytes(manifest: Manifest) -> int:
    return sum(stored.size_bytes for stored in (*manifest.full, *manifest.changes))


def list_lines(listed: Sequence[ListedVersion]) -> list[str]:
    """Return a line per version under a heading."""
    rows = [("version", "published", "kind", "stored", "full", "ratio", "base", "deltas", "kept because")]
    for item in listed:
        why = [f"pinned: {item.pinned}"] if item.kept is None and item.pinned is not None else item.kept
        rows.append(
            (
                item.version,
                _at(item.created_at_s),
                item.kind,
                size_text(item.stored_bytes),
                size_text(item.full_bytes),
                f"{item.full_bytes / max(1, item.stored_bytes):.3g}",
                item.base or "",
                str(item.num_deltas),
                "unknown" if why is None else "; ".join(why) or "nothing needs it",
            )
        )
    total_bytes = sum(item.stored_bytes for item in listed)
    return [*table_lines(rows, right=(3, 4, 5, 7)), f"{len(listed)} versions, {size_text(total_bytes)} in the store"]


def table_lines(rows: Sequence[Sequence[str]], *, right: Iterable[int]) -> list[str]:
    """Return a line per row, its columns aligned.

    Args:
        rows: of equally many cells; the first one is the heading.
        right: numbers of the columns that are aligned to the right.
    """
    rows = [[escape_controls(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [">" if number in set(right) else "<" for number in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)).rstrip()
        for row in rows
    ]


def show_command(args: argparse.Namespace) -> int:
    """Print the manifest of one version, and what it is assembled from."""
    place = open_versions(args)
    (version,) = chosen(args, [args.version], place)
    manifest = place.versions.manifest(version)
    pinned = place.versions.pinned().get(version)
    chain = [manifest]
    missing = None
    try:
        chain += [place.versions.manifest(base) for base in place.versions.bases(version)]
    except (ObjectNotFoundError, MalformedError) as error:
        missing = str(error)
    if args.json:
        document = {"manifest": manifest.model_dump(mode="json", by_alias=True), "kind": kind_of(manifest)}
        route = [{"version": each.version, "kind": kind_of(each), "bytes": _route_bytes(each)} for each in chain]
        print(json.dumps({**document, "chain": route, "missing": missing, "pinned": pinned}, indent=1))
        return 0
    print("\n".join(map(escape_controls, show_lines(manifest, chain, missing=missing, pinned=pinned))))
    return 0


def show_lines(manifest: Manifest, chain: Sequence[Manifest], *, missing: str | None, pinned: str | None) -> list[str]:
    """Return all of one version, a fact per line.

    Args:
        chain: the version, and the versions down to the nearest full one.
        missing: why the chain ends before a full version.
        pinned: why an operator has pinned the version.
    """
    num_params = sum(math.prod(tensor.shape) for tensor in manifest.tensors)
    count = f"{len(manifest.tensors)} tensors, {num_params:,} parameters, " if manifest.tensors else ""
    canary = manifest.canary
    mean = sum(canary.logprobs) / len(canary.logprobs)
    lines = [
        f"version {manifest.version} of run {manifest.run!r}, published {_at(manifest.created_at_s)}",
        f"  parent {manifest.parent or 'none'}, {count}{manifest.dtype}, {size_text(manifest.full_bytes)}",
    ]
    if manifest.is_full:
        lines.append(f"  stored whole: {_files_text(manifest.full)}")
    if manifest.delta is not None:
        ratio = manifest.full_bytes / max(1, manifest.delta_bytes)
        lines.append(
            f"  stored as a delta against {manifest.delta.base}: {_files_text(manifest.delta.objects)}, {ratio:.3g} "
            "times smaller"
        )
    if manifest.adapter is not None:
        adapter = manifest.adapter
        ratio = manifest.full_bytes / max(1, manifest.adapter_bytes)
        lines.append(
            f"  stored as an adapter of rank {adapter.rank}, alpha {adapter.alpha}, for {adapter.base}: "
            f"{size_text(manifest.adapter_bytes)}, {ratio:.3g} times smaller"
        )
    steps = " <- ".join(f"{each.version} ({_step_text(each)})" for each in chain)
    lines.append(f"  assembled from {steps}: {size_text(sum(map(_route_bytes, chain)))}")
    if missing is not None:
        lines.append(f"  CANNOT BE ASSEMBLED from the store: {missing}")
    lines += [
        f"  parameters {manifest.params_sha256}, config {manifest.model_config_sha256[:12]}, tokenizer "
        f"{manifest.tokenizer_sha256[:12]}",
        f"  canary: {len(canary.prompt_tokens)} + {len(canary.response_tokens)} tokens, mean log-prob {mean:.4f}, "
        f"tolerance {canary.tolerance:g}",
        f"  written with torch {manifest.torch_version}, transformers {manifest.transformers_version}",
    ]
    lines += [] if pinned is None else [f"  pinned: {pinned}"]
    largest = sorted(manifest.tensors, key=lambda tensor: -tensor.size_bytes)[:NUM_LARGEST]
    for tensor in largest:
        shape = " x ".join(map(str, tensor.shape))
        lines.append(f"    {tensor.name}: {tensor.dtype} {shape}, {size_text(tensor.size_bytes)}, xxh3 {tensor.digest}")
    if more := len(manifest.tensors) - len(largest):
        lines.append(f"    and {more} smaller ones (--json)")
    return lines


def _route_bytes(manifest: Manifest) -> int:
    """Bytes that a searcher which holds nothing downloads of this version on its way."""
    return sum(stored.size_bytes for stored in (manifest.full if manifest.is_full else manifest.changes))


def _step_text(manifest: Manifest) -> str:
    if manifest.is_full:
        return "full"
    return "delta" if manifest.adapter is None else "adapter"


def _files_text(objects: Sequence[Any]) -> str:
    num_bytes = sum(stored.size_bytes for stored in objects)
    return f"{len(objects)} file{'' if len(objects) == 1 else 's'}, {size_text(num_bytes)}"


def _at(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


# ---- Pins -----------------------------------------------------------------------------------------------------------


def pin_command(args: argparse.Namespace) -> int:
    """Pin a version."""
    place = open_versions(args)
    (version,) = chosen(args, [args.version], place)
    place.versions.pin(version, args.reason)
    others = sorted(place.versions.needed_by([version]) - {version}, reverse=True)
    if args.json:
        print(json.dumps({"version": str(version), "pinned": args.reason, "needs": list(map(str, others))}, indent=1))
        return 0
    needs = f"; with it stays what it is assembled from: {', '.join(map(str, others))}" if others else ""
    print(f"pinned version {version} of run {place.run!r}{needs}")
    return 0


def unpin_command(args: argparse.Namespace) -> int:
    """Take a pin back."""
    place = open_versions(args)
    (version,) = chosen(args, [args.version], place)
    reason = place.versions.pinned().get(version)
    place.versions.unpin(version)
    if args.json:
        print(json.dumps({"version": str(version), "was_pinned": reason}, indent=1))
    elif reason is None:
        print(f"version {version} of run {place.run!r} was not pinned; nothing was changed")
    else:
        print(escape_controls(f"unpinned version {version} of run {place.run!r}, which was pinned: {reason}"))
    return 0


# ---- Delete ---------------------------------------------------------------------------------------------------------


def gc_command(args: argparse.Namespace) -> int:
    """Delete the versions that nothing needs, newest first: what they are assembled from goes after them."""
    place = open_versions(args)
    # listed before the buffer is asked: what is published meanwhile is not touched
    existing = place.versions.versions()
    info = _held(args, place)
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
        print("which version was best is known to the buffer alone: pin it before you delete")
    return 0


def _held(args: argparse.Namespace, place: VersionStore) -> RunInfo | None:
    """Return the run as its buffer knows it; None: `--run-is-over`, and nobody can be asked.

    Raises:
        ConfigError: nobody can be asked, and nobody has said that the run is over; or it is in progress.
    """
    try:
        info = _ask(args, place)
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
        return None
    _check_run(info, place)
    return info
