"""Errors of boto3: tell whether a retry may help, and turn them into tba's errors, whose message says what to do."""

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

from tba.errors import ObjectExistsError, ObjectNotFoundError, StoreError, StoreUnavailableError
from tba.tls import explain_tls_error

S3_ERRORS = (ClientError, BotoCoreError, Boto3Error, RecursionError)
"""All errors that boto3 raises on purpose, and RecursionError: boto3 follows endless redirects until the stack ends."""

_CONNECTION_ERRORS = (ConnectionError, HTTPClientError, IncompleteReadError, ResponseStreamingError)
_CREDENTIAL_ERRORS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_TRANSIENT_CODES = ("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError")
_REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")


def is_transient(error: Exception) -> bool:
    """Return whether a retry may succeed: the connection failed, or the reply was 409, 429 or a fault of the server."""
    if _is_redirect_loop(error):
        return False
    if isinstance(error, ClientError):
        code, status = _code(error), status_of(error)
        return status >= 500 or status in (409, 429) or code in _TRANSIENT_CODES
    if isinstance(error, SSLError):
        return explain_tls_error(error, where="", ca_file=None) is None  # else a handshake that was cut off
    return isinstance(error, _CONNECTION_ERRORS)


def _is_redirect_loop(error: Exception) -> bool:
    """Return whether endless redirects caused a RecursionError, which botocore may have wrapped."""
    wrapped = error.kwargs.get("error") if isinstance(error, HTTPClientError) else error
    return isinstance(wrapped, RecursionError)


def store_error(
    error: Exception, *, verb: str, key: str, url: str, endpoint: str, timeout_s: float, ca_file: str | None
) -> StoreError:
    """Return tba's error to raise in place of boto3's `error`.

    Args:
        verb: the operation for the message: read, write, list, delete, check, look up, create the bucket of.
        timeout_s: seconds for which the operation was retried.
        ca_file: PEM file of the certificate authorities trusted for an https endpoint.
    """
    what = f"cannot {verb} {key or 'the store'} in {url} at {endpoint}"
    if isinstance(error, ClientError):
        return _answer_error(error, what=what, where=f"object {key} in {url}", url=url, timeout_s=timeout_s)
    if _is_redirect_loop(error):
        return StoreUnavailableError(
            f"{what}: the server redirects every request, as a web page does, or an address that wants https; correct "
            "store.endpoint_url"
        )
    if isinstance(error, _CREDENTIAL_ERRORS):
        return StoreUnavailableError(
            f"{what}: no credentials were found ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    problem = explain_tls_error(error, where=endpoint, ca_file=ca_file, setting="store.ca_file")
    if problem is not None:
        return StoreUnavailableError(f"{what}: {problem}")
    if isinstance(error, _CONNECTION_ERRORS):
        return StoreUnavailableError(
            f"{what}: no answer after trying for {timeout_s:g} s ({error}); check that the server runs and that "
            "store.endpoint_url is right (http or https)"
        )
    return StoreUnavailableError(f"{what}: {error}; check the [store] section of the recipe")


def _answer_error(error: ClientError, *, what: str, where: str, url: str, timeout_s: float) -> StoreError:
    code, status = _code(error), status_of(error)
    answer = f"{status} {code} {error.response.get('Error', {}).get('Message', '')}".strip()
    if code == "NoSuchBucket":
        bucket = url.removeprefix("s3://").partition("/")[0]
        return StoreUnavailableError(f"{what}: bucket {bucket!r} does not exist; create it, or correct store.url")
    if code in _REGION_CODES:
        return StoreUnavailableError(f"{what}: the server answered {answer}; set store.region to the bucket's region")
    if status in (401, 403):
        return StoreUnavailableError(
            f"{what}: access denied ({answer}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, that they are not "
            "expired and may list, read, write and delete there, and the clock of this machine"
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


def status_of(error: ClientError) -> int:
    """Return the HTTP status in an error of boto3; 0 if it has none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
