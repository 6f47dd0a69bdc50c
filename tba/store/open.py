"""From the `[store]` section of a recipe to a store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from tba.config.sections import StoreSection
from tba.errors import ConfigError, StoreError
from tba.store.base import ObjectStore, check_prefix
from tba.store.file import FileStore
from tba.trust import check_ca_file


def open_store(section: StoreSection, *, part_bytes: int | None = None) -> ObjectStore:
    """Open the store that `section.url` names; nothing is contacted yet (see `ObjectStore.check`).

    Args:
        part_bytes: size of the parts in which S3 is sent large files; default: as the store thinks best.

    Raises:
        ConfigError: the URL is neither `file://folder` nor `s3://bucket/prefix`, the endpoint is not a URL, or
            `ca_file` cannot be used.
    """
    scheme, _, rest = section.url.partition("://")
    if scheme == "file" and rest:
        return FileStore(Path(rest))
    if scheme != "s3" or not rest:
        raise ConfigError(
            f"store.url {section.url!r} is not a store: use file://folder on one machine, or s3://bucket/prefix"
        )
    bucket, _, prefix = rest.partition("/")
    try:
        prefix = check_prefix(prefix.strip("/"))
    except StoreError as error:
        raise ConfigError(f"store.url {section.url!r}: {error}") from None
    endpoint = section.endpoint_url
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
        timeout_s=section.timeout_s,
        ca_file=section.ca_file,
        **({} if part_bytes is None else {"part_bytes": part_bytes}),
    )
