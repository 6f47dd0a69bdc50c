"""How long certificates are still valid: that of `[tls]`, and those that the addresses of the recipe show."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from tba.doctor.finding import Finding, fail, ok, skip, warn
from tba.doctor.patient import CALL_TIMEOUT_S, Patient

WARN_DAYS = 14
_DAY_S = 86_400.0
_PORTS = {"https": 443, "rediss": 6379}
_UTC_TIME, _TIMES = 0x17, (0x17, 0x18)
_BEGIN = "-----BEGIN CERTIFICATE-----"


def probe_certificates(patient: Patient) -> Iterator[Finding]:
    """The files of `[tls]`, then each https and rediss address, once."""
    path = patient.recipe.tls.cert_file
    if path is not None:
        try:
            yield _judge(f"tls.cert_file {path}", min(map(not_after_s, _certificates(Path(path)))))
        except OSError as error:
            yield skip("tls-certificate", f"tls.cert_file {path} is not read here: {error.strerror or error}")
        except ValueError as error:
            yield fail("tls-certificate", f"tls.cert_file {path}: {error}", "give a PEM file with the certificate")
    for host, port in sorted(_addresses(patient)):
        where = f"the certificate that {host}:{port} shows"
        try:
            yield _judge(where, not_after_s(_shown_by(host, port)))
        except (OSError, ValueError) as error:  # the probes of that service say what keeps it
            yield skip("tls-certificate", f"{where}: not seen ({str(error)[:200] or type(error).__name__})")


def not_after_s(certificate: bytes) -> float:
    """Unix time at which a certificate (DER) ends.

    Raises:
        ValueError: it is no certificate.
    """
    try:
        _, outer, _ = _element(certificate)
        _, to_be_signed, _ = _element(outer)
        tag, _, rest = _element(to_be_signed)
        if tag == 0xA0:  # the version, which may be left out: then this was the serial number
            _, _, rest = _element(rest)
        for _ in range(2):  # algorithm, issuer
            _, _, rest = _element(rest)
        _, validity, _ = _element(rest)
        _, _, rest = _element(validity)
        tag, text, _ = _element(rest)
        if tag not in _TIMES:
            raise ValueError(f"a time has the tag {tag}")
        moment = text.decode("ascii")
        if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049 (RFC 5280)
            moment = ("19" if moment >= "50" else "20") + moment
        return datetime.strptime(moment, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except (ValueError, IndexError) as error:
        raise ValueError(f"holds no certificate that can be read ({error})") from None


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag and content of the first DER element, and what follows it."""
    length, start = data[1], 2
    if length & 0x80:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("it ends too early")
    return data[0], data[start : start + length], data[start + length :]


def _certificates(path: Path) -> list[bytes]:
    """Each of a PEM file: a chain is as good as the first of it that ends."""
    blocks = path.read_text(encoding="ascii", errors="replace").split(_BEGIN)[1:]
    if not blocks:
        raise ValueError("holds no certificate in PEM format")
    return [ssl.PEM_cert_to_DER_cert(_BEGIN + block.partition("-----END")[0] + ssl.PEM_FOOTER) for block in blocks]


def _addresses(patient: Patient) -> set[tuple[str, int]]:
    recipe = patient.recipe
    urls = [patient.url("buffer"), patient.url("reward"), recipe.buffer.redis_url, recipe.store.endpoint_url]
    parts = [urlsplit(url) for url in urls if url is not None]
    return {(part.hostname or "localhost", part.port or _PORTS[part.scheme]) for part in parts if part.scheme in _PORTS}


def _shown_by(host: str, port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent; an expired one is to be seen
    with (
        socket.create_connection((host, port), timeout=CALL_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def _judge(what: str, until_s: float) -> Finding:
    left_days = (until_s - time.time()) / _DAY_S
    day = datetime.fromtimestamp(until_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    mend = "renew it: servers read changed files by themselves; docs/operations.md, TLS, says how"
    if left_days <= 0:
        return fail("tls-certificate", f"{what} has expired at {day}", mend)
    if left_days < WARN_DAYS:
        return warn("tls-certificate", f"{what} expires in {left_days:.1f} days, at {day}", mend)
    return ok("tls-certificate", f"{what} is valid until {day}")
