"""Folders `<lineage>-<step>/` without a manifest: a trainer was killed while it wrote or deleted them."""

from __future__ import annotations

from collections.abc import Collection

from tba.errors import MalformedError
from tba.store import ObjectStore
from tba.versions import PolicyVersion

MANIFEST_NAME = "manifest.json"


def delete_incomplete(
    store: ObjectStore, prefix: str, *, before_lineage: int, keep: Collection[PolicyVersion]
) -> list[PolicyVersion]:
    """Delete the folders under `prefix` that have no manifest and are of older lineages.

    Args:
        prefix: ends with a slash; what is not named like a version under it is left alone.
        before_lineage: the lineage of a trainer that may be writing now; only older ones are touched.
        keep: never deleted.

    Returns:
        The versions whose folders were deleted, oldest first.

    Raises:
        StoreUnavailableError
    """
    folders: dict[PolicyVersion, list[str]] = {}
    for key in store.list(prefix):
        try:
            version = PolicyVersion.parse(key.removeprefix(prefix).partition("/")[0])
        except MalformedError:
            continue
        folders.setdefault(version, []).append(key)
    deleted = []
    for version, keys in sorted(folders.items()):
        is_complete = f"{prefix}{version}/{MANIFEST_NAME}" in keys
        if is_complete or version.lineage >= before_lineage or version in keep:
            continue
        for key in keys:
            store.delete(key)
        deleted.append(version)
    return deleted
