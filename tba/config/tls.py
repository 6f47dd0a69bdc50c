"""The section of a recipe about encrypted connections."""

from __future__ import annotations

from pydantic import model_validator

from tba.config.base import StrictModel


class TlsSection(StrictModel):
    """Encrypted connections to the buffer, to the reward service and to Redis. PEM files that are read again when they
    change; docs/operations.md says how to renew them."""

    cert_file: str | None = None
    """Certificate (with its chain) that the buffer and the reward service show. With it they speak https alone, and
    `buffer.url` and `reward.url` default to https."""
    key_file: str | None = None
    """Private key of `cert_file`, without a passphrase."""
    ca_file: str | None = None
    """The authorities that clients trust for https URLs of buffer and reward and for a rediss URL of Redis, and no
    others; none: those of the system. The object store has `store.ca_file`."""

    @model_validator(mode="after")
    def _check(self) -> TlsSection:
        if (self.cert_file is None) != (self.key_file is None):
            given, missing = ("cert_file", "key_file") if self.key_file is None else ("key_file", "cert_file")
            raise ValueError(f"tls.{given} is given without tls.{missing}: a server needs both; add it or remove both")
        return self

    @property
    def scheme(self) -> str:
        """What the buffer and the reward service speak: http or https."""
        return "http" if self.cert_file is None else "https"
