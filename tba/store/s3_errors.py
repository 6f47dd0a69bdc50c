"""What went wrong between boto3 and an S3 server, as one sentence that says what to do."""

from __future__ import annotations

from boto3.exceptions import Boto3Error
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
    SSLError,
)
from s3transfer.exceptions import RetriesExceededError

from tba.errors import ObjectExistsError, ObjectNotFoundError, StoreError, StoreUnavailableError

S3_ERRORS = (ClientError, BotoCoreError, Boto3Error, RetriesExceededError, RecursionError)
"""Everything that boto3 raises on purpose; it follows a server that redirects every request until the stack ends."""

_CONNECTION_ERRORS = (
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
    RetriesExceededError,
)
_CREDENTIAL_ERRORS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_TRANSIENT_CODES = ("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError")
_REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")


def is_transient(error: Exception) -> bool:
    """True if the same request may succeed a moment later: no connection, 409, 429, or the server's own fault."""
    if isinstance(error, ClientError):
        code, status = _code(error), _status(error)
        return status >= 500 or status in (409, 429) or code in _TRANSIENT_CODES
    return isinstance(error, _CONNECTION_ERRORS) and not isinstance(error, SSLError)


def store_error(error: Exception, *, verb: str, key: str, url: str, endpoint: str, timeout_s: float) -> StoreError:
    """The error to raise instead of `error`.

    Args:
        verb: what was tried: read, write, list, delete, check.
        timeout_s: how long it was tried.
    """
    what = f"cannot {verb} {key or 'the store'} in {url} at {endpoint}"
    if isinstance(error, ClientError):
        return _answer_error(error, what=what, where=f"object {key} in {url}", url=url, timeout_s=timeout_s)
    if isinstance(error, RecursionError):
        return StoreUnavailableError(
            f"{what}: the server redirects every request, as a web page does, or an address that wants https; correct "
            "store.endpoint_url"
        )
    if isinstance(error, _CREDENTIAL_ERRORS):
        return StoreUnavailableError(
            f"{what}: no credentials were found ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, SSLError):
        return StoreUnavailableError(
            f"{what}: the TLS certificate was not accepted ({error}); set AWS_CA_BUNDLE to the file of its authority"
        )
    if isinstance(error, _CONNECTION_ERRORS):
        return StoreUnavailableError(
            f"{what}: no answer after trying for {timeout_s:g} s ({error}); check that the server runs and that "
            "store.endpoint_url is right"
        )
    return StoreUnavailableError(f"{what}: {error}; check the [store] section of the recipe")


def _answer_error(error: ClientError, *, what: str, where: str, url: str, timeout_s: float) -> StoreError:
    code, status = _code(error), _status(error)
    answer = f"{status} {code} {error.response.get('Error', {}).get('Message', '')}".strip()
    if code == "NoSuchBucket":
        bucket = url.removeprefix("s3://").partition("/")[0]
        return StoreUnavailableError(f"{what}: bucket {bucket!r} does not exist; create it, or correct store.url")
    if code in _REGION_CODES:
        return StoreUnavailableError(f"{what}: the server answered {answer}; set store.region to the bucket's region")
    if status in (401, 403):
        return StoreUnavailableError(
            f"{what}: access denied ({answer}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that they may "
            "list, read, write and delete there"
        )
    if status == 404:
        return ObjectNotFoundError(f"{where} does not exist")
    if status == 412:
        return ObjectExistsError(f"{where} exists already, and this write may only create")
    if is_transient(error):
        return StoreUnavailableError(
            f"{what}: the server kept answering {answer} for {timeout_s:g} s; look at its logs, then try again"
        )
    return StoreUnavailableError(f"{what}: the server answered {answer}; check the [store] section of the recipe")


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
