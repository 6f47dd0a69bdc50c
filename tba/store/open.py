"""Open the object store of a recipe, and wait for a store that is still starting."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from tba.config.sections import StoreSection
from tba.errors import ConfigError, StoreError, StoreUnavailableError, WaitTimeoutError
from tba.store.file import FileStore, ObjectStore, check_prefix
from tba.tls import check_bare_url, check_ca_file, without_secrets

POLL_S = 1.0
TIMEOUT_S = 30.0
"""Deadline of one operation on S3, including retries; in a download, it counts from the last received byte."""


def is_retryable(error: StoreUnavailableError) -> bool:
    """Return whether a retry may succeed, since the store is unreachable or overloaded. False for wrong credentials."""
    cause = error.__cause__
    if cause is None or isinstance(cause, OSError):
        return False  # the embedded store: a missing folder stays missing
    from tba.store.s3_errors import is_transient

    return isinstance(cause, Exception) and is_transient(cause)


def is_bucket_missing(error: StoreUnavailableError) -> bool:
    """Return whether the error says that the bucket does not exist."""
    response = getattr(error.__cause__, "response", None)
    return isinstance(response, dict) and response.get("Error", {}).get("Code") == "NoSuchBucket"


def wait_for_store(
    store: ObjectStore, *, wait_s: float, on_progress: Callable[[str], None], create_bucket: bool = False
) -> None:
    """Wait until the store can be written and honours create-only writes (wait `store-start`).

    Args:
        wait_s: deadline in seconds.
        on_progress: called with sentences for people: a wait begins, or the bucket was created.
        create_bucket: create the bucket if it does not exist.

    Raises:
        StoreError: access denied, no bucket, or create-only writes not honoured: waiting does not help.
        WaitTimeoutError: the store did not answer in time.
    """
    deadline_s, has_reported = time.monotonic() + wait_s, False
    while True:
        try:
            store.check(write=True)
            return
        except StoreUnavailableError as error:
            # only once: a bucket that is missing again was deleted by somebody else
            if create_bucket and is_bucket_missing(error):
                store.create_bucket()
                on_progress(f"made the bucket of {store.url}")
                create_bucket = False
                continue
            if is_bucket_missing(error):
                raise StoreUnavailableError(f"{error}; `tba setup --create-bucket` makes it") from error.__cause__
            # wrong keys stay wrong, and a person waits for the answer
            if not is_retryable(error):
                raise
            if time.monotonic() > deadline_s:
                raise WaitTimeoutError(
                    f"wait 'store-start': the store was not ready within {wait_s:.0f} s: {error}"
                ) from None
            if not has_reported:
                on_progress(f"wait 'store-start' ({wait_s:.0f} s at most): {error}")
                has_reported = True
        time.sleep(POLL_S)


def open_store(section: StoreSection, *, timeout_s: float = TIMEOUT_S, part_bytes: int | None = None) -> ObjectStore:
    """Open the store at `section.url`, without any network call yet (see `ObjectStore.check`).

    Args:
        timeout_s: deadline of one operation on S3.
        part_bytes: size of the parts of large files on S3; None: the store's default.

    Raises:
        ConfigError: the URL is neither `file://folder` nor `s3://bucket/prefix`, the endpoint is not a URL, or
            `ca_file` cannot be used.
    """
    scheme, _, rest = section.url.partition("://")
    if scheme == "file" and rest:
        return FileStore(Path(rest))
    if scheme != "s3" or not rest:
        raise ConfigError(
            f"store.url {without_secrets(section.url)!r} is not a store: use file://folder on one machine, or "
            "s3://bucket/prefix"
        )
    bucket, _, prefix = rest.partition("/")
    check_bare_url(bucket, "store.url")
    endpoint = section.endpoint_url
    check_bare_url(endpoint or "", "store.endpoint_url")
    try:
        prefix = check_prefix(prefix.strip("/"))
    except StoreError as error:
        raise ConfigError(f"store.url {section.url!r}: {error}") from None
    if endpoint is not None and (urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname):
        raise ConfigError(f"store.endpoint_url {endpoint!r} is not a URL such as https://s3.example.com:9000")
    if endpoint is None or endpoint.startswith("https://"):
        check_ca_file(section.ca_file, "store.ca_file")
    from tba.store.s3 import S3Store  # boto3 takes 0.3 s to import

    return S3Store(
        bucket=bucket,
        prefix=prefix,
        endpoint_url=endpoint,
        region=section.region,
        timeout_s=timeout_s,
        ca_file=section.ca_file,
        **({} if part_bytes is None else {"part_bytes": part_bytes}),
    )
