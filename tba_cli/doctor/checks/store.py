"""Check the object store: whether it answers, can be written, and can do what weight versions need."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tba.errors import ConfigError, StoreError
from tba.store import ObjectStore, open_store
from tba_cli.artifacts import required_folders
from tba_cli.doctor.target import CheckResult, Target, fail, ok, skip, warn

TIMEOUT_S = 10.0
"""Deadline of one operation."""
PART_BYTES = 5 * 2**20
"""The smallest part that S3 allows."""
LARGE_BYTES = 2 * PART_BYTES + 1024 * 1024
"""Size of an object that is uploaded in parts."""
FIX_STORE = "the message says what is wrong; docs/deploy.md, Redis and object stores"


def check_store(target: Target) -> Iterator[CheckResult]:
    """Check that the store answers. If services here write to it, also write and remove objects under `check/`."""
    section = target.recipe.store
    if section.url.startswith("file://"):
        is_of_run = not section.url.startswith("file:///")
        if not target.is_local:
            yield warn(
                "store",
                f"store.url is {section.url}, a folder of one machine, and the services have addresses of their own",
                "use s3://BUCKET/PREFIX, or mount one file system with hard links at that path in every container",
            )
        elif is_of_run:
            yield ok("store", f"store.url {section.url} is a folder inside the run's folder, which `tba run` makes")
        if is_of_run:
            return
    try:
        # small parts, so that a few MiB are an upload in parts
        store = open_store(section, timeout_s=TIMEOUT_S, part_bytes=PART_BYTES)
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
    try:
        store.check(write=True)
        yield ok("store-write", "objects can be written, once each where that is asked for, and deleted")
        yield _large(store, f"check/{secrets.token_hex(8)}")
    except StoreError as error:
        yield fail("store-write", str(error), FIX_STORE)


def _large(store: ObjectStore, key: str) -> CheckResult:
    """Try an upload in parts and a download in ranges; proxies that limit the size of bodies may refuse them."""
    with tempfile.TemporaryDirectory(prefix="tba-doctor-") as place:
        source, copy = Path(place) / "source", Path(place) / "copy"
        source.write_bytes(os.urandom(LARGE_BYTES))
        try:
            store.put_file(key, source, create_only=True)
            store.get_file(key, copy)
        finally:
            store.delete(key)
        if copy.read_bytes() != source.read_bytes():
            return fail("store-parts", "an object sent in parts came back changed", "use another server, or repair it")
    return ok("store-parts", f"an upload in parts and a download work ({LARGE_BYTES >> 20} MiB)")
