"""The store on any S3-compatible server, with boto3.

Create-only writes use `If-None-Match: *`.
"""

from __future__ import annotations

import builtins
import contextlib
import filecmp
import os
import secrets
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import stamina
import urllib3.exceptions
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import ClientError, IncompleteReadError, ResponseStreamingError

from tba.errors import ConfigError, ObjectExistsError, StoreTlsError, StoreUnavailableError
from tba.store.file import check_key, check_prefix, check_size, new_file, open_source
from tba.store.s3_errors import S3_ERRORS, is_transient, status_of, store_error
from tba.tls import explain_tls_error

T = TypeVar("T")

_PART_BYTES = 32 << 20
"""Size of a part. Files above twice this size are sent and read in parts. Files above 312 GiB have larger parts."""
_CHUNK_BYTES = 1 << 16
"""Bytes that are read and written at a time in a download."""
_NUM_CONNECTIONS = 4
_MAX_NUM_PARTS = 10_000


class S3Store:
    """Store objects in one bucket below one prefix; see `ObjectStore` for the contract.

    Each request, or each part of a large file, is retried for up to `timeout_s`. The last attempt may then wait for the
    next byte for as long again, 30 s at most. A transfer that makes progress is never interrupted.
    """

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str,
        endpoint_url: str | None,
        region: str,
        timeout_s: float,
        ca_file: str | None = None,
        part_bytes: int = _PART_BYTES,
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._timeout_s, self._part_bytes, self._ca_file = timeout_s, part_bytes, ca_file
        self._has_answered = False
        # path-style addresses, and checksums only where S3 requires them: every server understands that, and the
        # manifests carry our own sha256
        config = Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=min(5.0, timeout_s),
            read_timeout=min(30.0, timeout_s),
            retries={"total_max_attempts": 1, "mode": "standard"},  # `_call` retries, with one deadline
            max_pool_connections=2 * _NUM_CONNECTIONS,
        )
        try:
            self._client = Session().client(
                "s3", endpoint_url=endpoint_url, region_name=region, config=config, verify=ca_file
            )
        except (ValueError, *S3_ERRORS) as error:
            raise ConfigError(f"store {self.url} cannot be opened: {error}; check the [store] section") from error
        self._endpoint = self._client.meta.endpoint_url

    def check(self, *, write: bool = False) -> None:
        """List the bucket; with `write`, also test that a second create-only write of the same key is refused."""
        self._call("check", "", lambda: self._client.list_objects_v2(**self._where_prefix(""), MaxKeys=1))
        if not write:
            return
        key = f"check/{secrets.token_hex(8)}"
        self.put(key, b"first", create_only=True)
        try:
            self.put(key, b"second", create_only=True)
        except ObjectExistsError:
            return
        finally:
            self.delete(key)
        raise StoreUnavailableError(
            f"the server at {self._endpoint} ignores `If-None-Match: *`, so that two trainers could overwrite each "
            "other's weight versions; use a server that honours it (docs/deploy.md lists some)"
        )

    def create_bucket(self) -> None:
        """Create the bucket, unless it exists and belongs to us.

        Raises:
            StoreUnavailableError: the server does not allow it, or the bucket belongs to somebody else.
        """
        region = self._client.meta.region_name
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}

        def create() -> None:
            with contextlib.suppress(self._client.exceptions.BucketAlreadyOwnedByYou):
                self._client.create_bucket(Bucket=self._bucket, **place)

        self._call("create the bucket of", "", create)

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write an object."""
        where = self._where(key)
        self._put(
            key,
            lambda extra: self._client.put_object(**where, Body=data, **extra),
            create_only=create_only,
            is_same=lambda: self.get(key) == data,
        )

    def put_file(self, key: str, path: Path, *, create_only: bool = False) -> None:
        """Write an object from a file, in one request, or in several parallel ones if the file is large."""
        where = self._where(key)
        with open_source(path) as source:
            size_bytes = os.fstat(source.fileno()).st_size
            if size_bytes > 2 * self._part_bytes:
                self._put_in_parts(key, path, source.fileno(), size_bytes, create_only=create_only)
                return

            def send(extra: dict[str, str]) -> None:
                source.seek(0)
                self._client.put_object(**where, Body=source, **extra)

            self._put(key, send, create_only=create_only, is_same=lambda: self._holds_file(key, path))

    def get(self, key: str) -> bytes:
        """Read an object."""
        where = self._where(key)
        return self._call("read", key, lambda: _read(self._client.get_object(**where)["Body"]))

    def get_file(self, key: str, path: Path, *, max_bytes: int | None = None) -> None:
        """Download an object to a file, in one request, or in parallel ranges if the object is large."""
        where = self._where(key)
        found = self._call("read", key, lambda: self._client.head_object(**where))
        size_bytes = found.get("ContentLength")
        if size_bytes is None:  # of a cache that compresses: how much it may send is not known
            raise StoreUnavailableError(f"{self._endpoint} answers HEAD of {key} without Content-Length")
        check_size(key, size_bytes, max_bytes, url=self.url)
        part_bytes = self._part_bytes if size_bytes > 2 * self._part_bytes else max(size_bytes, 1)
        same = where | ({"IfMatch": found["ETag"]} if "ETag" in found else {})
        has_failed = threading.Event()
        with new_file(path) as out:

            def receive_part(begin: int) -> None:
                end = min(begin + part_bytes, size_bytes)
                span = {} if end - begin == size_bytes else {"Range": f"bytes={begin}-{end - 1}"}
                if has_failed.is_set():  # this part would have a deadline of its own
                    return
                try:
                    self._call("read", key, lambda: self._receive(same | span, out.name, begin, end))
                except BaseException:
                    has_failed.set()
                    raise

            with ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="store-download") as pool:
                builtins.list(pool.map(receive_part, range(0, size_bytes, part_bytes)))

    def _receive(self, where: dict[str, str], path: str, begin: int, end: int) -> None:
        """Download the bytes [begin, end) of an object, and write them at the same offset of a file."""
        try:
            answer = self._client.get_object(**where)
        except ClientError as error:
            if status_of(error) == 412:
                raise StoreUnavailableError(
                    f"object {where['Key']} was replaced while it was read; try again"
                ) from error
            raise
        with contextlib.closing(answer["Body"]) as body, open(path, "r+b") as file:
            if "Range" in where and not str(answer.get("ContentRange", "")).startswith(f"bytes {begin}-"):
                raise StoreUnavailableError(
                    f"{self._endpoint} answers {where['Key']} without the range that was asked for; a store and its "
                    "cache must serve ranges"
                )
            file.seek(begin)
            while (left := end - file.tell()) > 0:
                # never more than was announced, whatever is sent
                data = _read(body, min(_CHUNK_BYTES, left))
                if not data:
                    raise IncompleteReadError(actual_bytes=end - begin - left, expected_bytes=end - begin)
                file.write(data)

    def size_bytes(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if no object has this key."""
        # a listing and not HEAD, whose 404 has no body and cannot tell a missing object from a missing bucket
        where = self._where_prefix(check_key(key))
        page = self._call("look up", key, lambda: self._client.list_objects_v2(**where, MaxKeys=1))
        return next((item["Size"] for item in page.get("Contents", []) if item["Key"] == where["Prefix"]), None)

    def delete(self, key: str) -> None:
        """Delete an object; do nothing if no object has this key."""
        where = self._where(key)
        self._call("delete", key, lambda: self._client.delete_object(**where))

    def list(self, prefix: str) -> builtins.list[str]:
        """Return all keys that start with `prefix`, sorted."""
        where = self._where_prefix(check_prefix(prefix))

        def pages() -> builtins.list[str]:
            found = self._client.get_paginator("list_objects_v2").paginate(**where)
            return [item["Key"].removeprefix(self._prefix) for page in found for item in page.get("Contents", [])]

        return sorted(self._call("list", prefix, pages))

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _where_prefix(self, prefix: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Prefix": self._prefix + prefix}

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        try:
            for attempt in stamina.retry_context(
                on=is_transient, attempts=None, timeout=self._timeout_s, wait_initial=0.1, wait_max=2.0, wait_jitter=0.2
            ):
                with attempt:
                    return self._try(verb, operation)
        except S3_ERRORS as error:
            raise store_error(
                error,
                verb=verb,
                key=key,
                url=self.url,
                endpoint=self._endpoint,
                timeout_s=self._timeout_s,
                ca_file=self._ca_file,
            ) from error
        raise AssertionError("a retry loop ends with a result or an error")

    def _try(self, verb: str, operation: Callable[[], T]) -> T:
        """Run an operation once. For a TLS problem, raise StoreTlsError if the store has never answered."""
        try:
            result = operation()
        except S3_ERRORS as error:
            if not self._has_answered:
                # after an answer the store may be getting a new certificate, which passes; before, a person must fix it
                problem = explain_tls_error(error, where=self._endpoint, ca_file=self._ca_file, setting="store.ca_file")
                if problem is not None:
                    raise StoreTlsError(f"cannot {verb} the store {self.url}: {problem}") from error
                # a refusal is an answer, too; a server that speaks TLS may answer plain http with 400
                self._has_answered = isinstance(error, ClientError) and status_of(error) != 400
            raise
        self._has_answered = True
        return result

    def _put(
        self, key: str, send: Callable[[dict[str, str]], Any], *, create_only: bool, is_same: Callable[[], bool]
    ) -> None:
        """Send a write with retries. `is_same` says whether the object that a create-only retry finds is equal."""
        num_tries = 0

        def operation() -> None:
            nonlocal num_tries
            num_tries += 1
            send({"IfNoneMatch": "*"} if create_only else {})

        try:
            self._call("write", key, operation)
        except ObjectExistsError:
            # the answer to the first try may have been lost: then the content decides
            if num_tries == 1 or not is_same():
                raise

    def _put_in_parts(self, key: str, path: Path, file: int, size_bytes: int, *, create_only: bool) -> None:
        """Upload a file in parts, each with its own retries; the object exists once the whole upload is completed."""
        where = self._where(key)
        part_bytes = max(self._part_bytes, -(-size_bytes // _MAX_NUM_PARTS))
        upload = self._call("write", key, lambda: self._client.create_multipart_upload(**where))["UploadId"]

        def send_part(number: int) -> dict[str, Any]:
            data = os.pread(file, part_bytes, (number - 1) * part_bytes)
            answer = self._call(
                "write", key, lambda: self._client.upload_part(**where, UploadId=upload, PartNumber=number, Body=data)
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="store-upload") as pool:
                parts = builtins.list(pool.map(send_part, range(1, -(-size_bytes // part_bytes) + 1)))
            self._put(
                key,
                lambda extra: self._client.complete_multipart_upload(
                    **where, UploadId=upload, MultipartUpload={"Parts": parts}, **extra
                ),
                create_only=create_only,
                is_same=lambda: self._holds_file(key, path),
            )
        except BaseException:
            # the first error is the one to report; the bucket's lifecycle rule removes what is left
            with contextlib.suppress(*S3_ERRORS):
                self._client.abort_multipart_upload(**where, UploadId=upload)
            raise

    def _holds_file(self, key: str, path: Path) -> bool:
        """Download the object, unless its size differs, and return whether it equals the file byte for byte."""
        if self.size_bytes(key) != path.stat().st_size:
            return False
        with tempfile.TemporaryDirectory(prefix="tba-compare-") as folder:
            stored = Path(folder) / "object"
            self.get_file(key, stored)
            return filecmp.cmp(stored, path, shallow=False)


def _read(body: Any, size_bytes: int | None = None) -> bytes:
    """Read `size_bytes` of the body of a reply; None: all of it. Raise ResponseStreamingError for an SSLError, the only
    connection error that botocore does not convert."""
    try:
        return body.read(size_bytes)
    except urllib3.exceptions.SSLError as error:
        # its text alone: the server speaks TLS, whatever OpenSSL makes of a damaged record
        broken = ResponseStreamingError(error=str(error))
    raise broken
