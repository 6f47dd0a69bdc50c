"""Whom clients trust behind an https or rediss address, and what to do where TLS cannot be had as the settings say."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

from tba.errors import ConfigError

PROBE_TIMEOUT_S = 5.0
"""Deadline of a connection that only looks whether TLS is spoken, and of its handshake."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
"""What OpenSSL calls an answer that is no TLS."""
_EXPIRED, _NOT_YET_VALID, _OTHER_HOST, _OTHER_ADDRESS = 10, 9, 62, 64
"""X509_V_ERR_* of OpenSSL."""
_DEFAULT_PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}


def check_ca_file(ca_file: str | None, setting: str = "tls.ca_file") -> None:
    """Whether the certificates of authorities can be read; None stands for the system's.

    Args:
        setting: what names the file in a recipe.

    Raises:
        ConfigError: they cannot.
    """
    if ca_file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_file)
    except ssl.SSLError:
        raise ConfigError(f"{setting} {ca_file} holds no certificate in PEM format") from None
    except OSError as error:
        raise ConfigError(f"{setting} {ca_file} cannot be read: {error.strerror}") from None


def tls_trouble(
    error: BaseException, *, where: str, ca_file: str | None, setting: str = "tls.ca_file", plain: str = "http"
) -> str | None:
    """What is wrong with the TLS of an address and how to mend it, where that is what an error says; None: it says
    something else, which may pass by itself.

    Args:
        error: of any client library; the SSLError may lie beneath it.
        where: the address.
        ca_file: what is trusted; None: the system's authorities.
        setting: what names that file in a recipe.
        plain: scheme of an address without TLS.
    """
    found = _ssl_error(error)
    if isinstance(found, ssl.SSLCertVerificationError):
        return _not_accepted(found, where=where, ca_file=ca_file, setting=setting)
    if found is not None and found.reason in _NO_TLS:
        return (
            f"{where} does not speak TLS ({found.reason}); write {plain}:// for it, or give that server a certificate"
        )
    return None


def missed_tls(url: str, *, ca_file: str | None, setting: str = "tls.ca_file") -> str | None:
    """What is wrong and how to mend it, where an address without TLS is that of a server that speaks it; None: it is
    not. Connects once."""
    parts = urlsplit(url)
    secure = {"http": "https", "redis": "rediss"}.get(parts.scheme)
    if secure is None or not _speaks_tls(parts.hostname or "localhost", parts.port or _DEFAULT_PORTS[parts.scheme]):
        return None
    where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    trusted = f"{setting} is the file of the authority that it needs" if ca_file is None else f"{setting} is {ca_file}"
    return f"{where} speaks TLS: write {secure}:// for it ({trusted})"


def _not_accepted(error: ssl.SSLCertVerificationError, *, where: str, ca_file: str | None, setting: str) -> str:
    said = error.verify_message.rstrip(".")
    if error.verify_code == _EXPIRED:
        return f"the certificate of {where} is not accepted ({said}); renew it there, and look at this machine's clock"
    if error.verify_code == _NOT_YET_VALID:
        return f"the certificate of {where} is not accepted ({said}); look at the clocks of both machines"
    if error.verify_code in (_OTHER_HOST, _OTHER_ADDRESS):
        return (
            f"the certificate of {where} is not accepted ({said}); it must name this host in its subjectAltName, or "
            "the address must be one that it names"
        )
    if ca_file is None:
        return (
            f"the certificate of {where} is not trusted ({said}); set {setting} to a PEM file with the authority that "
            "signed it, for none of this system's did"
        )
    return f"the certificate of {where} is not trusted ({said}); {setting} {ca_file} must hold the authority behind it"


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    """The one that lies nearest beneath an error."""
    seen: list[BaseException] = [error]
    for each in seen:  # grows
        if isinstance(each, ssl.SSLError):
            return each
        beneath = (*each.args, getattr(each, "reason", None), each.__cause__, each.__context__)
        seen += [more for more in beneath if isinstance(more, BaseException) and more not in seen]
    return None


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent but the greeting
    try:
        with (
            socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except OSError:
        return False
