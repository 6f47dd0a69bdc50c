"""The bundled object store: ministack's S3 behind a gate that accepts two pairs of keys, one of them read-only.

The keys come from READ_WRITE_ACCESS_KEY_ID, READ_WRITE_SECRET_ACCESS_KEY, READ_ONLY_ACCESS_KEY_ID and
READ_ONLY_SECRET_ACCESS_KEY, or from the section `default` of files in boto3's format that READ_WRITE_KEYS_FILE and
READ_ONLY_KEYS_FILE name. The port is GATEWAY_PORT, the address BIND_HOST; the rest is ministack's.

The gate checks the signature of a request's head (AWS Signature Version 4). The digest of the body is part of it, but
is not compared with the body: protection against changes on the way is the task of TLS.
"""

from __future__ import annotations

import asyncio
import configparser
import hmac
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
HEALTH = "/_ministack/health"
"""The only path that needs no keys; the other paths of ministack itself are closed to all."""
READS = ("GET", "HEAD")
MAX_SKEW = timedelta(minutes=15)
"""Allowed difference of the clocks, as for S3: a request that was overheard cannot be sent again later."""
_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/,]+)/(?P<day>\d{8})/(?P<region>[^/,]+)/s3/aws4_request, ?"
    r"SignedHeaders=(?P<headers>[^,]+), ?Signature=(?P<signature>[0-9a-f]{64})"
)


class Pair(NamedTuple):
    """Keys, and whether they may write."""

    credentials: Credentials
    writes: bool


class RefusedError(Exception):
    """A request is refused: the error code of S3, and a sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def keys(environ: Mapping[str, str]) -> dict[str, Pair]:
    """Return access key id -> pair of keys.

    Raises:
        ValueError: a pair is missing or too short, or both have one id.
    """
    found: dict[str, Pair] = {}
    for name, writes in (("READ_WRITE", True), ("READ_ONLY", False)):
        values = {key: environ.get(f"{name}_{key}", "") for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
        if file := environ.get(f"{name}_KEYS_FILE"):
            parser = configparser.ConfigParser(interpolation=None)
            if not parser.read(file) or "default" not in parser:
                raise ValueError(f"{name}_KEYS_FILE {file} cannot be read, or has no section [default]")
            values = {key: parser["default"].get(f"aws_{key.lower()}", "") for key in values}
        identity, secret = values["ACCESS_KEY_ID"], values["SECRET_ACCESS_KEY"]
        if not identity or len(secret) < 16:
            raise ValueError(
                f"there are no keys {name}, or the secret has fewer than 16 characters; make-secrets makes them"
            )
        if identity in found:
            raise ValueError(f"{identity} is the id of both pairs; the one that may only read needs another one")
        found[identity] = Pair(Credentials(identity, secret), writes)
    return found


class Gate:
    """Lets signed requests pass to `app`; with the read-only pair only GET and HEAD."""

    def __init__(self, app: App, pairs: Mapping[str, Pair]) -> None:
        self._app, self._pairs = app, pairs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and _asks_for_health(scope)):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._check(scope)
        except RefusedError as error:
            await _refuse(scope, receive, send, error)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        signed = _SIGNED.fullmatch(headers.get("authorization", ""))
        if signed is None:
            raise RefusedError("AccessDenied", "the request is not signed with AWS Signature Version 4 for s3")
        pair = self._pairs.get(signed["key"])
        if pair is None:
            raise RefusedError("InvalidAccessKeyId", "the access key id is not known here")
        _check_date(headers.get("x-amz-date", ""))
        if not hmac.compare_digest(_signature(scope, headers, signed, pair.credentials), signed["signature"]):
            raise RefusedError("SignatureDoesNotMatch", "the signature is not that of the secret key")
        if scope["path"].startswith("/_"):  # the path as ministack sees it, unescaped
            raise RefusedError("AccessDenied", "this is no bucket")
        if not pair.writes and scope["method"] not in READS:
            raise RefusedError("AccessDenied", f"{signed['key']} may only read")


def _asks_for_health(scope: Scope) -> bool:
    return scope["method"] in READS and scope["raw_path"] == HEALTH.encode()


def _check_date(date: str) -> None:
    try:
        signed_at = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise RefusedError("AccessDenied", "x-amz-date is missing or is no date") from None
    if abs(datetime.now(UTC) - signed_at) > MAX_SKEW:
        raise RefusedError("RequestTimeTooSkewed", "the clocks of client and server differ by more than 15 minutes")


def _signature(scope: Scope, headers: Mapping[str, str], signed: re.Match[str], credentials: Credentials) -> str:
    """Return the expected signature: botocore signs the request again, as the client must have done."""
    names = signed["headers"].split(";")
    if not {"host", "x-amz-date", "x-amz-content-sha256"} <= set(names):
        raise RefusedError("AccessDenied", "host, x-amz-date and x-amz-content-sha256 have to be signed")
    target = scope["raw_path"].decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    request = AWSRequest(scope["method"], f"http://{headers.get('host', '')}{target}")
    for name in names:
        request.headers[name] = headers.get(name, "")
    request.context["timestamp"] = headers["x-amz-date"]
    signer = S3SigV4Auth(credentials, "s3", signed["region"])
    signature = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    assert isinstance(signature, str)
    return signature


async def _refuse(scope: Scope, receive: Receive, send: Send, error: RefusedError) -> None:
    while (await receive()).get("more_body"):  # a client that still sends does not read the answer
        pass
    body = f"<Error><Code>{error.code}</Code><Message>{error}</Message></Error>".encode()
    head = [(b"content-type", b"application/xml"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": head})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def main() -> None:
    """Serve until SIGTERM."""
    try:
        pairs = keys(os.environ)
    except ValueError as error:
        sys.exit(f"error: object store: {error}")
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from ministack.app import app

    config = Config()
    config.bind = [f"{os.environ.get('BIND_HOST', '127.0.0.1')}:{os.environ.get('GATEWAY_PORT', '9000')}"]
    config.keep_alive_timeout = 75
    config.loglevel = os.environ.get("LOG_LEVEL", "WARNING")
    asyncio.run(serve(Gate(app, pairs), config))  # pyright: ignore[reportArgumentType]  # hypercorn's own types of ASGI


if __name__ == "__main__":
    main()
