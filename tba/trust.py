"""The file of authorities that clients trust."""

from __future__ import annotations

import ssl

from tba.errors import ConfigError


def check_ca_file(ca_file: str | None) -> None:
    """Whether the certificates of authorities can be read; None stands for the system's.

    Raises:
        ConfigError: they cannot.
    """
    if ca_file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_file)
    except ssl.SSLError:
        raise ConfigError(f"tls.ca_file {ca_file} holds no certificate in PEM format") from None
    except OSError as error:
        raise ConfigError(f"tls.ca_file {ca_file} cannot be read: {error.strerror}") from None
