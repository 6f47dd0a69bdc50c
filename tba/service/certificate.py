"""The certificate that a server shows, followed as its files are renewed."""

from __future__ import annotations

import ssl

from tba.errors import ConfigError
from tba.watched_file import WatchedFile


class Certificate:
    """A TLS context whose certificate follows its files: connections made after a renewal get the new one, open ones go
    on. A renewed pair that does not fit (somebody is half-way through writing it) is logged, and the old one stays.

    Raises:
        ConfigError: the files cannot be read or do not belong together.
    """

    def __init__(self, cert_file: str, key_file: str) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.options |= ssl.OP_NO_RENEGOTIATION

        def load() -> None:
            # a pair that does not fit would leave a context without any
            _load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert_file, key_file)
            _load_into(self.context, cert_file, key_file)

        self._watched = WatchedFile([cert_file, key_file], load, what=f"tls.cert_file {cert_file}")

    def refresh(self) -> None:
        """Look whether the files changed, at most once a second."""
        _ = self._watched.value


def _load_into(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    for name, path in (("cert_file", cert_file), ("key_file", key_file)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"tls.{name} {path} cannot be read: {error.strerror}") from None
    try:
        # without a passphrase of its own, OpenSSL would ask for one on the terminal
        context.load_cert_chain(cert_file, key_file, password=lambda: b"")
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls.cert_file {cert_file} and tls.key_file {key_file} are no pair of a PEM certificate and its key "
            f"without a passphrase: {error.reason or error}"
        ) from None
