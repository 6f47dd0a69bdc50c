"""Check the object store: whether it answers, can be written, and can do what weight versions need."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tba.config.sections import StoreSection
from tba.errors import ConfigError, ObjectExistsError, ObjectNotFoundError, StoreError, StoreUnavailableError
from tba.store import ObjectStore, open_store
from tba_cli.artifacts import required_folders
from tba_cli.doctor.target import CheckResult, Target, fail, ok, skip, warn

TIMEOUT_S = 10.0
"""Deadline of one operation."""
SMALL_BYTES = 1024
PART_BYTES = 5 * 2**20
"""The smallest part that S3 allows."""
LARGE_BYTES = 2 * PART_BYTES + 1024 * 1024
"""Sent in parts."""
FIX_STORE = "the message says what is wrong; docs/deploy.md, Redis and object stores"


def check_store(target: Target) -> Iterator[CheckResult]:
    """Write, read, list and remove a few objects under `check/`."""
    section = target.recipe.store.model_copy(update={"timeout_s": min(TIMEOUT_S, target.recipe.store.timeout_s)})
    if section.url.startswith("file://"):
        yield from _folder(target, section)
        if not section.url.startswith("file:///"):
            return
    try:
        # small parts, so that a few MiB are an upload in parts
        store = open_store(section, part_bytes=PART_BYTES)
        store.check()
    except (StoreError, ConfigError) as error:
        # the reward service reads the store for its models alone
        if target.services == {"reward"} and not required_folders(target.recipe, "reward"):
            yield skip("store", f"not reachable from here, but nothing here needs it ({error})")
        else:
            yield fail("store", str(error), FIX_STORE)
        return
    yield ok("store", f"{store.url} answers")
    if target.services <= {"searcher", "reward"}:
        yield skip("store-write", "the services here only read, and may have keys that cannot write")
        return
    prefix = f"check/doctor-{secrets.token_hex(6)}"
    try:
        yield _small(store, f"{prefix}/small")
        yield _create_only(store, f"{prefix}/once")
        yield _large(store, f"{prefix}/large")
    except StoreError as error:
        yield fail("store-write", str(error), FIX_STORE)


def _folder(target: Target, section: StoreSection) -> Iterator[CheckResult]:
    if not target.is_local:
        yield warn(
            "store",
            f"store.url is {section.url}, a folder of one machine, and the services have addresses of their own",
            "use s3://BUCKET/PREFIX, or mount one file system with hard links at that path in every container",
        )
    elif not section.url.startswith("file:///"):
        yield ok("store", f"store.url {section.url} is a folder inside the run's folder, which `tba run` makes")


def _small(store: ObjectStore, key: str) -> CheckResult:
    """Try read after write, overwrite, size, list and delete."""
    first, second = os.urandom(SMALL_BYTES), os.urandom(SMALL_BYTES)
    try:
        store.put(key, first)
        same = store.get(key) == first
        store.put(key, second)
        same = same and store.get(key) == second and store.size_bytes(key) == SMALL_BYTES and key in store.list(key)
    finally:
        store.delete(key)
    try:
        store.get(key)
        is_gone = False
    except ObjectNotFoundError:
        is_gone = True
    if same and is_gone:
        return ok("store-write", "write, overwrite, read, list and delete work")
    return fail(
        "store-write",
        "a read right after a write or a delete does not see it",
        "use a server with read-after-write consistency, and no cache in between",
    )


def _create_only(store: ObjectStore, key: str) -> CheckResult:
    try:
        store.put(key, b"first", create_only=True)
        try:
            store.put(key, b"second", create_only=True)
        except ObjectExistsError:
            return ok("store-create-only", "a second create-only write (If-None-Match: *) of a key is refused")
        return fail(
            "store-create-only",
            "the server ignores `If-None-Match: *`: two trainers could overwrite each other's weight versions",
            "use a server that honours it (docs/deploy.md, Redis and object stores, lists some)",
        )
    finally:
        store.delete(key)


def _large(store: ObjectStore, key: str) -> CheckResult:
    """Try an upload in parts, and a download in ranges."""
    with tempfile.TemporaryDirectory(prefix="tba-doctor-") as place:
        source, copy = Path(place) / "source", Path(place) / "copy"
        source.write_bytes(os.urandom(LARGE_BYTES))
        try:
            store.put_file(key, source, create_only=True)
            store.get_file(key, copy)
            same = copy.read_bytes() == source.read_bytes()
        except StoreUnavailableError as error:
            return fail("store-parts", f"an upload in parts failed: {error}", FIX_STORE)
        finally:
            store.delete(key)
    if not same:
        return fail("store-parts", "an object sent in parts came back changed", "use another server, or repair it")
    return ok("store-parts", f"an upload in parts and a download work ({LARGE_BYTES >> 20} MiB)")
