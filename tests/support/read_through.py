"""A read-through cache before an S3 server: it signs for its clients, who do not, and reads each object once."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.s3_server import LoopbackServer

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class ReadThroughCache(LoopbackServer):
    """Answers unsigned GET and HEAD of /BUCKET/KEY, whole or a range, as nginx-s3-gateway does.

    `spoil` changes what it serves.
    """

    def __init__(self, endpoint_url: str) -> None:
        self.spoil: Callable[[bytes], bytes] = lambda body: body
        self.sends_length = True
        self.trailer = b""
        """Sent behind every body, and counted in its length; HEAD does not say so."""
        self.num_requests = 0
        self.store_bytes = 0
        """Read from the store so far."""
        self._client = Session().client(
            "s3", endpoint_url=endpoint_url, region_name="us-east-1", config=Config(s3={"addressing_style": "path"})
        )
        self._objects: dict[str, bytes] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        super().__init__(self._handler())

    def _object(self, path: str) -> bytes:
        with self._locks[path]:
            if path not in self._objects:
                bucket, _, key = unquote(path).lstrip("/").partition("/")
                self._objects[path] = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
                self.store_bytes += len(self._objects[path])
            return self._objects[path]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cache = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._serve(with_body=False)

            def do_GET(self) -> None:
                self._serve(with_body=True)

            def _serve(self, *, with_body: bool) -> None:
                cache.num_requests += 1
                try:
                    body = cache.spoil(cache._object(self.path))
                except ClientError as error:
                    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 502)
                    self._send(status, b"", {}, with_body=with_body)
                    return
                span = _RANGE.fullmatch(self.headers.get("Range") or "")
                if span is None or not body:
                    self._send(200, body, {}, with_body=with_body)
                    return
                begin, end = int(span[1]), int(span[2] or len(body) - 1)
                where = {"Content-Range": f"bytes {begin}-{min(end, len(body) - 1)}/{len(body)}"}
                self._send(206, body[begin : end + 1], where, with_body=with_body)

            def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
                self.send_response_only(status)
                body += cache.trailer if with_body else b""
                length = {"Content-Length": str(len(body))} if cache.sends_length else {"Connection": "close"}
                for name, value in {**headers, "ETag": '"same"', **length}.items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        return Handler
