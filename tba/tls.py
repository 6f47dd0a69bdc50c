"""URLs without their secrets, checks of addresses and certificate authorities, and explanations of TLS errors."""

from __future__ import annotations

import ipaddress
import re
import ssl
from typing import Any

from tba.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    # a name that is looked up could be anything, so every other name counts as outside
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def is_ip_address(host: str) -> bool:
    """Return whether `host` is an IP address and not a name."""
    try:
        return ipaddress.ip_address(host) is not None
    except ValueError:
        return False


def without_secrets(url: str) -> str:
    """Return a URL (or a text that was meant as a URL) without user, password and options."""
    scheme = re.match(r"(?i:[a-z][a-z0-9+.-]*://)?", url).group()  # pyright: ignore[reportOptionalMemberAccess]
    rest = url.removeprefix(scheme)
    place = rest.partition("?")[0].partition("#")[0]
    if "@" in rest.removeprefix(place):  # an unencoded password, or options: its end is unknown
        return scheme + "..."
    authority, slash, path = place.partition("/")
    if ":" in authority:  # what follows may be a password with a slash in it
        authority, slash, path = place, "", ""
    return scheme + authority.rpartition("@")[2] + slash + path


def with_bare_urls(value: Any) -> Any:
    """Remove user, password and options from every URL in a text, or in all texts of a document; return the result."""
    if isinstance(value, str):
        # from "://" on: a search for the scheme takes quadratic time; a password, and no port, may have spaces in it
        url = r"://(?:[^\s/:@\[]*:(?!\s|\d+\W)[^@\n]{0,200}@)?\S+"
        return re.sub(url, lambda found: "://" + without_secrets(found.group()[3:]), value)
    if isinstance(value, dict):
        return {key: with_bare_urls(child) for key, child in value.items()}
    return [with_bare_urls(child) for child in value] if isinstance(value, list) else value


def check_bare_url(url: str, key: str = "the address") -> str:
    """Return a URL unchanged; if it may hold a secret, raise ConfigError, which names `key` and hides the URL."""
    if any(mark in url for mark in "@?#"):
        raise ConfigError(
            f"{key} has a user, a password or options in it (@, ? or #), which no request would carry, and which would "
            "be in logs; remove them"
        )
    return url


def address(host: str, port: int | str) -> str:
    """Return host:port as in a URL, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
"""OpenSSL's names for a reply that is not TLS."""


def check_ca_file(ca_file: str | None, setting: str = "tls.ca_file") -> None:
    """Raise ConfigError if the file of certificate authorities cannot be used; None means the system's authorities.

    Args:
        setting: the recipe's key that names the file, for errors.
    """
    if ca_file is None:
        return
    try:
        # a wrong file would otherwise fail at the first call, in words about the server
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_file)
    except ssl.SSLError:
        raise ConfigError(f"{setting} {ca_file} holds no certificate in PEM format") from None
    except OSError as error:
        raise ConfigError(f"{setting} {ca_file} cannot be read: {error.strerror}") from None


def explain_tls_error(
    error: BaseException, *, where: str, ca_file: str | None, setting: str = "tls.ca_file", plain: str = "http"
) -> str | None:
    """Return a sentence about a lasting TLS problem of an address, and the remedy; None for any other error.

    Args:
        error: error of any client library; its causes are searched for an SSLError.
        where: the address, for the sentence.
        ca_file: PEM file of the trusted certificate authorities; None: the system's.
        setting: the recipe's key that names this file.
        plain: the scheme of an address without TLS.
    """
    causes: list[BaseException] = [error]
    for each in causes:  # grows
        # urllib3 and botocore keep the cause in args or `reason`, redis and the standard library in the chain
        beneath = (*each.args, getattr(each, "reason", None), each.__cause__, each.__context__)
        causes += [more for more in beneath if isinstance(more, BaseException) and more not in causes]
    found = next((each for each in causes if isinstance(each, ssl.SSLError)), None)
    if isinstance(found, ssl.SSLCertVerificationError):
        authority = f"set {setting} to" if ca_file is None else f"{setting} {ca_file} must be"
        return (
            f"the certificate of {where} is not accepted ({found.verify_message.rstrip('.')}); it must be valid now, "
            f"name this host in its subjectAltName, and {authority} a PEM file with the authority that signed it"
        )
    # other failures of a handshake may pass: a server that restarts cuts connections off
    if found is not None and found.reason in _NO_TLS:
        return (
            f"{where} does not speak TLS ({found.reason}); write {plain}:// for it, or give that server a certificate"
        )
    return None
