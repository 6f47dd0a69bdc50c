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


class TbaError(Exception):
    """Root of every error raised on purpose."""

    slug = "error"
    status = 500


class ConfigError(TbaError, ValueError):
    """A recipe, setting, environment variable or flag is wrong."""

    slug = "config"
    status = 422


class ModelError(ConfigError):
    """The starting model is none for the engine or the settings: a searcher that is started again ends the same way."""


class WireError(TbaError, ValueError):
    """Bytes are not what they claim to be."""

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
    """The bytes read are not the bytes that were written."""

    slug = "digest"


class OlderRedisError(TbaError):
    """Redis knows less of the run than the object store: its data was replaced, or is an older copy."""

    slug = "older-redis"


class TeamError(TbaError):
    """Another process of the same trainer is gone or does not answer."""

    slug = "team"


class GuardError(TbaError):
    """An alarm, or too many skipped batches, has failed the run; its batch has not touched the weights."""

    slug = "guard"


class ServiceError(TbaError, RuntimeError):
    """Another service answered with a problem, or not at all."""

    slug = "service"


class BadReplyError(ServiceError):
    """The answer is not what it should be, and is not used."""

    slug = "bad-reply"
    status = 502


class BadRequestError(ServiceError):
    """The request is wrong; a retry cannot help."""

    slug = "bad-request"
    status = 400


class UnauthorizedError(ServiceError):
    """No token, or an unknown one; a client raises it for 403 too."""

    slug = "unauthorized"
    status = 401


class ForbiddenError(UnauthorizedError):
    """The token is known, but its role may not do this; or there are no tokens, and a page of another site asks."""

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
    """The fencing token is not the newest lineage's: a newer trainer start took the run, and this trainer must stop."""

    slug = "fenced"


class VoidBatchError(ConflictError):
    """The batch is past its deadline or unknown: draw a new one for the same step."""

    slug = "void-batch"


class RollbackError(ConflictError):
    """An operator has asked for a rollback: until the trainer has begun a new lineage, no step of this one is made."""

    slug = "rollback"


class RunOverError(ConflictError):
    """The run is stopping, done or failed: nothing new is started."""

    slug = "run-over"


class RunFailedError(RunOverError):
    """The run has failed for a reason that its trainer does not know: `state_reason` of GET /v1/run."""

    slug = "run-failed"


class NotInstalledError(ServiceError):
    """The service lacks an optional package; a retry cannot help."""

    slug = "not-installed"
    status = 501


class BusyError(ServiceError):
    """Flow control, memory, or nothing to draw yet: come back after `retry_after_s`."""

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
    """The service, or a part that it needs, is away; nothing was acknowledged."""

    slug = "unavailable"
    status = 503


class BrokenRewardError(UnavailableError):
    """A scorer raises for every item: a person must fix it, waiting does not help."""

    slug = "broken-reward"


class SupersededError(UnavailableError):
    """The epoch of a buffer process is not the newest: this one must end. Clients try again and reach the newer one."""

    slug = "superseded"


class WaitTimeoutError(TbaError, TimeoutError):
    """A named wait reached its deadline."""

    slug = "wait-timeout"
    status = 504


class ChildError(TbaError, RuntimeError):
    """A child process of `tba run` could not start, or died."""

    slug = "child"
