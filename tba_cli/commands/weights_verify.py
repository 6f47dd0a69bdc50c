"""`tba weights verify`: download weight versions and check every digest, by every way in which they are stored."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tba.errors import ConfigError, DigestError, MalformedError, ObjectNotFoundError
from tba.fields import escape_controls
from tba.versions import PolicyVersion
from tba.weights import LocalVersion
from tba.weights.routes import Route, RouteReader
from tba.wire.weight_manifest import Manifest
from tba_cli.commands.config import size_text
from tba_cli.commands.weights import VersionStore, chosen, open_versions

DAMAGE = (DigestError, MalformedError, ObjectNotFoundError)


@dataclass(frozen=True, slots=True)
class Check:
    """What came of one way to a version."""

    version: str
    what: str
    """full, delta, adapter, files (config and tokenizer), or manifest."""
    num_bytes: int
    error: str | None
    """None: every digest is right."""
    skipped: str | None = None
    """Why this way was not checked, where that is no damage."""

    def line(self) -> str:
        """Return it for people."""
        found = f"right, {size_text(self.num_bytes)}" if self.error is None else f"DAMAGED: {self.error}"
        if self.skipped is not None:
            found = f"not checked: {self.skipped}"
        return escape_controls(f"{self.version}  {self.what}: {found}")


def verify_command(args: argparse.Namespace) -> int:
    """Check versions, oldest first, a line per route; exit code 1 if one of them is damaged."""
    place = open_versions(args)
    wanted = place.versions.versions() if args.all else [chosen(args, args.version, place)]
    checks: list[Check] = []
    for check in _verify(place, wanted):
        checks.append(check)
        if not args.json:
            print(check.line(), flush=True)
    damaged = [check for check in checks if check.error is not None]
    if args.json:
        print(json.dumps({"run": place.run, "checks": list(map(asdict, checks))}, indent=1))
    else:
        print(f"{len(wanted)} versions, {len(checks)} checks, {len(damaged)} failed")
    return 1 if damaged else 0


def _verify(place: VersionStore, wanted: Sequence[PolicyVersion]) -> Iterator[Check]:
    """Yield a check for each way in which each version is stored, oldest version first."""
    manifests: dict[PolicyVersion, Manifest] = {}
    for version in wanted:
        try:
            manifests[version] = place.versions.manifest(version)
        except DAMAGE as error:
            yield Check(str(version), "manifest", 0, str(error))
    most_bytes = max((each.full_bytes for each in manifests.values()), default=0)
    # a version, the one before it, and what is downloaded of them
    changes = (each.delta_bytes + each.adapter_bytes for each in manifests.values())
    needed_bytes = 2 * most_bytes + max(changes, default=0)
    with tempfile.TemporaryDirectory(prefix="tba-weights-") as folder:
        if needed_bytes > (free_bytes := shutil.disk_usage(folder).free):
            raise ConfigError(
                f"checking these versions needs {needed_bytes:,} bytes, and {folder} has {free_bytes:,} free; set "
                "TMPDIR to a folder with more"
            )
        checker = _Checker(place, Path(folder))
        for manifest in manifests.values():
            yield from checker.check(manifest)


class _Checker:
    """Checks versions one after another; keeps the files of the last one, which is the base of the next."""

    def __init__(self, place: VersionStore, folder: Path) -> None:
        self._versions, self._folder = place.versions, folder
        self._reader = RouteReader(place.store, place.versions.manifest, cache=None)
        self._last: LocalVersion | None = None
        self._num_folders = 0
        self._seen_files: set[str] = set()

    def check(self, manifest: Manifest) -> Iterator[Check]:
        """Yield the checks of one version."""
        found = self._files(manifest)
        checks = [] if found is None else [found]
        local: LocalVersion | None = None
        # every object of the version is downloaded once; routes through other versions consist of theirs
        if manifest.is_full and manifest.base is not None and not self._versions.exists(manifest.base):
            # retention deletes it in time: nobody who is not at that version needs this way
            checks.append(Check(manifest.version, "delta", 0, None, f"it is against {manifest.base}, which is deleted"))
        elif manifest.delta is not None:
            check, local = self._try(manifest, "delta", lambda: Route(self._base(manifest), (manifest,)))
            checks.append(check)
        if manifest.adapter is not None:
            adapter, base = manifest.adapter, PolicyVersion.parse(manifest.adapter.base)
            # the starting model stays: the next adapter is for it as well
            check, _ = self._try(manifest, "adapter", lambda: Route(self._assembled(base), (), adapter))
            checks.append(check)
        if manifest.is_full:
            # no more than two copies of the model are on the disk
            self._keep(self._last)
            check, local = self._try(manifest, "full", lambda: Route(manifest, ()))
            checks.append(check)
        self._keep(local or self._last)
        yield from checks

    def _try(self, manifest: Manifest, what: str, route: Callable[[], Route]) -> tuple[Check, LocalVersion | None]:
        try:
            local = self._reader.take(route(), manifest, self._new_folder())
        except DAMAGE as error:
            return Check(manifest.version, what, 0, str(error)), None
        return Check(manifest.version, what, local.downloaded_bytes, None), local

    def _base(self, manifest: Manifest) -> LocalVersion:
        """Return the version that a delta is against."""
        assert manifest.base is not None
        return self._assembled(manifest.base)

    def _assembled(self, base: PolicyVersion) -> LocalVersion:
        """Return a version that another one is stored against, assembled by any route."""
        if self._last is None or self._last.version != base:
            try:
                self._keep(self._versions.download_tensors(base, self._new_folder()))
            except DAMAGE as error:
                raise MalformedError(f"it is against {base}, which cannot be assembled: {error}") from None
        assert self._last is not None
        return self._last

    def _keep(self, local: LocalVersion | None) -> None:
        """Make `local` the last version, and delete all other files."""
        kept = {path.parent for path in local.paths} if local is not None else set()
        self._last = local
        for folder in self._folder.iterdir():
            if folder not in kept:
                shutil.rmtree(folder)

    def _new_folder(self) -> Path:
        self._num_folders += 1
        folder = self._folder / str(self._num_folders)
        folder.mkdir()
        return folder

    def _files(self, manifest: Manifest) -> Check | None:
        """Check the files that no version before it had; None: there are none."""
        new = [stored for stored in manifest.files if stored.key not in self._seen_files]
        self._seen_files.update(stored.key for stored in new)
        try:
            for stored in new:
                self._versions.read_file(manifest.policy_version, stored.name)
        except DAMAGE as error:
            return Check(manifest.version, "files", 0, str(error))
        return Check(manifest.version, "files", sum(stored.size_bytes for stored in new), None) if new else None
