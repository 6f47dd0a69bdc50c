"""All errors that tba raises on purpose, in one tree.

    TbaError
    |- ConfigError: ModelError
    |- WireError: MalformedError, SchemaVersionError, LimitError
    |- StoreError: ObjectNotFoundError, ObjectExistsError, StoreUnavailableError, StoreTlsError, DigestError
    |- ServiceError: BadReplyError, BadRequestError, NotInstalledError, NotFoundError, BusyError, TlsError
    |  |- UnauthorizedError: ForbiddenError
    |  |- ConflictError: FencedError, VoidBatchError, RollbackError, RunOverError (RunFailedError)
    |  `- UnavailableError: BrokenRewardError, SupersededError
    `- OlderRedisError, TeamError, GuardError, WaitTimeoutError, ChildError

A message says what is wrong, which value, and what to do. `slug` is the last part of the problem type URI
(RFC 9457) that a service answers with; docs/api.md lists them.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Iterable

from tba import __version__


class TbaError(Exception):
    """Root of every error raised on purpose."""

    slug = "error"
    status = 500


class ConfigError(TbaError, ValueError):
    """A recipe, setting, environment variable or flag is wrong."""

    slug = "config"
    status = 422


class ModelError(ConfigError):
    """The starting model does not fit the engine or the settings, so a restart of the searcher cannot help."""


class WireError(TbaError, ValueError):
    """Bytes or a document do not have the expected format."""

    slug = "wire"
    status = 422


class MalformedError(WireError):
    """Not msgpack, a missing or unknown field, a wrong type, or a wrong length."""

    slug = "malformed"


class SchemaVersionError(WireError):
    """A schema version that this build does not read."""

    slug = "schema-version"


class LimitError(WireError):
    """Well-formed, but larger than the limits allow."""

    slug = "too-large"
    status = 413


class StoreError(TbaError, OSError):
    """The object store failed."""

    slug = "store"
    status = 503


class ObjectNotFoundError(StoreError):
    """No object has this key."""

    slug = "object-not-found"


class ObjectExistsError(StoreError):
    """A create-only write found the key taken."""

    slug = "object-exists"


class StoreUnavailableError(StoreError):
    """The store cannot be reached, or answers with errors."""

    slug = "store-unavailable"


class StoreTlsError(StoreError):
    """The store never answered, because its TLS differs from the settings: a retry cannot help."""

    slug = "store-tls"


class DigestError(StoreError):
    """The bytes of an object or a tensor do not have the expected digest or size."""

    slug = "digest"


class OlderRedisError(TbaError):
    """Redis lacks steps of the run that the object store has: its data was replaced, or is an older copy."""

    slug = "older-redis"


class TeamError(TbaError):
    """Another process of the same trainer is gone or does not answer."""

    slug = "team"


class GuardError(TbaError):
    """An alarm, or too many skipped batches, has failed the run; the batch was not applied to the weights."""

    slug = "guard"


class ServiceError(TbaError, RuntimeError):
    """Another service answered with a problem, or not at all."""

    slug = "service"


class BadReplyError(ServiceError):
    """The reply of a service is not valid, and is not used."""

    slug = "bad-reply"
    status = 502


class BadRequestError(ServiceError):
    """The request is wrong; a retry cannot help."""

    slug = "bad-request"
    status = 400


class UnauthorizedError(ServiceError):
    """The request has no token, or an unknown one; clients raise this error for 403 too."""

    slug = "unauthorized"
    status = 401


class ForbiddenError(UnauthorizedError):
    """The role of the token may not do this; or the service has no tokens, and a web page of another site asks."""

    slug = "forbidden"
    status = 403


class NotFoundError(ServiceError):
    """There is no such rollout, prompt, batch, evaluation, snapshot or path."""

    slug = "not-found"
    status = 404


class ConflictError(ServiceError):
    """The state of the run forbids the call, for example the ack of a step before its turn."""

    slug = "conflict"
    status = 409


class FencedError(ConflictError):
    """The fencing token is not that of the newest lineage: another trainer owns the run, and this one must stop."""

    slug = "fenced"


class VoidBatchError(ConflictError):
    """The batch is past its deadline or unknown: draw a new one for the same step."""

    slug = "void-batch"


class RollbackError(ConflictError):
    """An operator has asked for a rollback: the trainer must begin a new lineage, and this one gets no more steps."""

    slug = "rollback"


class RunOverError(ConflictError):
    """The run is stopping, done or failed: nothing new is started."""

    slug = "run-over"


class RunFailedError(RunOverError):
    """The run has failed, and not by its trainer's decision; the reason is `state_reason` of GET /v1/run."""

    slug = "run-failed"


class NotInstalledError(ServiceError):
    """The service lacks an optional package; a retry cannot help."""

    slug = "not-installed"
    status = 501


class BusyError(ServiceError):
    """The service cannot do it yet (flow control, memory, nothing to draw): retry after `retry_after_s`."""

    slug = "busy"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 0.5, wait: str = "busy") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.wait = wait


class TlsError(ServiceError):
    """The service never answered, because its TLS differs from the settings: a retry cannot help."""

    slug = "tls"
    status = 502


class UnavailableError(ServiceError):
    """The service, or another one that it needs, cannot be reached; nothing was acknowledged."""

    slug = "unavailable"
    status = 503


class BrokenRewardError(UnavailableError):
    """A scorer raises for every item: a person must fix it, waiting does not help."""

    slug = "broken-reward"


class SupersededError(UnavailableError):
    """A newer buffer process owns the run (its epoch is higher), so this one must end; retries reach the new one."""

    slug = "superseded"


class WaitTimeoutError(TbaError, TimeoutError):
    """A named wait reached its deadline."""

    slug = "wait-timeout"
    status = 504


class ChildError(TbaError, RuntimeError):
    """A child process of `tba run` could not start, or died."""

    slug = "child"


def pip_install(*packages: str) -> str:
    """Return the command that installs packages for this Python; tba's own are those of `make wheels`."""
    own = ("--find-links", "dist/wheels") if any(name.startswith("tba-") for name in packages) else ()
    words = (f"{name}=={__version__}" if name.startswith("tba-") else name for name in packages)
    return shlex.join([sys.executable, "-m", "pip", "install", *own, *words])


def not_installed(what: str, *packages: str) -> ConfigError:
    """Return the error for what needs packages that are not installed; it names the command that installs them."""
    return ConfigError(f"{what} needs {' and '.join(packages)}, which this Python lacks; {pip_install(*packages)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the known one that is nearest; "" if none is near."""
    names = list(known)
    near = [name for text in (word, word.lower()) for name in difflib.get_close_matches(text, names, n=1, cutoff=0.75)]
    return f"; did you mean {near[0]!r}?" if near else ""
