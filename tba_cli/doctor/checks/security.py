"""Check tokens and certificates.

Tokens: the tokens file, and whether the services accept its tokens and no others.
Certificates: how long they are valid, the one of `[tls]` and those that the addresses of the recipe show.
"""

from __future__ import annotations

import os
import secrets
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from tba.errors import ConfigError
from tba.tls import is_loopback
from tba.tokens import ROLES, RoleTokens, is_digest, load_role_tokens
from tba_cli.doctor.target import CALL_TIMEOUT_S, Answer, CheckResult, Target, fail, ok, skip, warn

WARN_DAYS = 14
_DAY_S = 86_400.0
_PORTS = {"https": 443, "rediss": 6379}
_UTC_TIME, _TIMES = 0x17, (0x17, 0x18)
"""DER tags of UTCTime, and of both kinds of times."""
_BEGIN = "-----BEGIN CERTIFICATE-----"
NEEDED_BY = {
    "searcher": "searchers, and the buffer for the reward service",
    "trainer": "the trainer",
    "operator": "`tba setup`, `tba pause` and the like",
    "viewer": "people and dashboards that only look",
}
READ_PATHS = {"buffer": "/v1/run", "reward": "/v1/rewards"}
"""A path of each service that a GET reads and that changes nothing."""
READERS = {"buffer": ROLES, "reward": ("searcher", "operator", "viewer")}
"""The roles that may read it."""
FIX_TOKENS_FILE = "make the file again (docs/security.md, Tokens): a JSON map of four roles, 16 characters or more each"


def check_tokens(target: Target) -> Iterator[CheckResult]:
    """Check the tokens of each role."""
    path, recipe = target.recipe.auth.tokens_file, target.recipe
    if path is None and target.is_local:
        yield ok("tokens", "there is no auth.tokens_file: every start of `tba run` makes tokens of its own")
        return
    if path is None:
        hosts = {recipe.buffer.host, recipe.reward.host}
        if all(map(is_loopback, hosts)):
            yield ok("tokens", "there is no auth.tokens_file: services listen on loopback alone and ask for no token")
        else:
            yield fail("tokens", "auth.tokens_file is not set, and services listen beyond loopback", FIX_TOKENS_FILE)
        yield from _unknown_tokens(target, have_tokens=False)
        return
    try:
        tokens = load_role_tokens(path)
    except ConfigError as error:
        yield fail("tokens", str(error), f"{FIX_TOKENS_FILE}; in a container, check that the Secret is mounted there")
        return
    yield from _file(Path(path), tokens)
    yield from _accepted(target, tokens)
    yield from _unknown_tokens(target, have_tokens=True)


def _file(path: Path, tokens: RoleTokens) -> Iterator[CheckResult]:
    plain = [token for several in tokens.values() for token in several if not is_digest(token)]
    text = f"{path}: {len(tokens)} of {len(ROLES)} roles"
    if plain:
        text += f", tokens of {min(map(len, plain))} characters or more"
    # a file with one role belongs to one client; a service that checks tokens has to know all roles
    missing = [role for role in ROLES if role not in tokens] if len(tokens) > 1 else []
    if missing:
        yield warn(
            "tokens-roles",
            f"{text}; there is none for {', '.join(missing)}",
            f"add it for {NEEDED_BY[missing[0]]}",
        )
    else:
        yield ok("tokens", text)
    changing = [role for role, several in tokens.items() if len(several) > 1]
    if changing:
        yield warn(
            "tokens-changing",
            f"{', '.join(changing)} has two tokens: they are being changed",
            "take the old one out once every service has read the new file",
        )
    found = path.stat()
    mode, is_open = found.st_mode, all(folder.stat().st_mode & stat.S_IXOTH for folder in path.absolute().parents)
    if mode & stat.S_IWOTH:
        yield fail("tokens-mode", f"anybody may change {path} (mode {stat.filemode(mode)})", f"chmod o-w {path}")
    # what is mounted into a container belongs to somebody else
    elif plain and is_open and mode & stat.S_IROTH and found.st_uid == os.geteuid():
        yield warn("tokens-mode", f"anybody here may read {path} (mode {stat.filemode(mode)})", f"chmod o-r {path}")


def _accepted(target: Target, tokens: RoleTokens) -> Iterator[CheckResult]:
    services: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
    for service in services:
        refused, accepted = [], []
        tried = {role: [x for x in tokens.get(role, ()) if not is_digest(x)] for role in READERS[service]}
        if not any(tried.values()):
            yield skip("tokens-accepted", f"of the tokens of the {service} service the file has digests, if any")
            continue
        for role, sent in tried.items():
            answers = [target.ask(service, READ_PATHS[service], token=token) for token in sent]
            known = [answer for answer in answers if isinstance(answer, Answer)]
            if any(answer.status == 200 for answer in known):
                accepted.append(role)
            elif any(answer.status in (401, 403) for answer in known):
                refused.append(role)
        if refused:
            yield fail(
                "tokens-accepted",
                f"the {service} service refuses the tokens of {', '.join(refused)} (401)",
                f"give the {service} service the same file as here; it reads a changed file again by itself",
            )
        elif accepted:
            yield ok("tokens-accepted", f"the {service} service accepts the tokens of {', '.join(accepted)}")
        else:
            yield skip("tokens-accepted", f"the {service} service does not answer, so its tokens are not checked")


def _unknown_tokens(target: Target, *, have_tokens: bool) -> Iterator[CheckResult]:
    services: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
    for service in services:
        answer = target.ask(service, READ_PATHS[service], token=f"wrong-{secrets.token_hex(12)}")
        if not isinstance(answer, Answer):
            continue
        if answer.status == 401:
            if have_tokens:
                yield ok("tokens-refused", f"the {service} service refuses an unknown token")
            else:
                yield fail(
                    "tokens-refused",
                    f"the {service} service asks for a token, and the recipe here names no auth.tokens_file",
                    "set auth.tokens_file to the file of the services",
                )
        elif have_tokens and answer.status == 200:
            yield fail(
                "tokens-refused",
                f"the {service} service accepts an unknown token: it runs without tokens",
                f"give the {service} service auth.tokens_file and start it again",
            )


def check_certificates(target: Target) -> Iterator[CheckResult]:
    """Check the files of `[tls]`, then each https and rediss address once."""
    path = target.recipe.tls.cert_file
    if path is not None:
        try:
            yield _judge(f"tls.cert_file {path}", min(map(not_after_s, _certificates(Path(path)))))
        except OSError as error:
            yield skip("tls-certificate", f"tls.cert_file {path} is not read here: {error.strerror or error}")
        except ValueError as error:
            yield fail("tls-certificate", f"tls.cert_file {path}: {error}", "give a PEM file with the certificate")
    for host, port in sorted(_addresses(target)):
        where = f"the certificate that {host}:{port} shows"
        try:
            yield _judge(where, not_after_s(_shown_by(host, port)))
        except (OSError, ValueError) as error:  # the check of that service says why it does not answer
            yield skip("tls-certificate", f"{where}: not seen ({str(error)[:200] or type(error).__name__})")


def not_after_s(certificate: bytes) -> float:
    """Return the Unix time at which a certificate (DER) ends.

    Raises:
        ValueError: it is not a certificate.
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
    """Return the tag and the content of the first DER element, and the bytes after it."""
    length, start = data[1], 2
    if length & 0x80:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("it ends too early")
    return data[0], data[start : start + length], data[start + length :]


def _certificates(path: Path) -> list[bytes]:
    """Return every certificate of a PEM file (DER): a chain ends with the first of them that ends."""
    blocks = path.read_text(encoding="ascii", errors="replace").split(_BEGIN)[1:]
    if not blocks:
        raise ValueError("holds no certificate in PEM format")
    return [ssl.PEM_cert_to_DER_cert(_BEGIN + block.partition("-----END")[0] + ssl.PEM_FOOTER) for block in blocks]


def _addresses(target: Target) -> set[tuple[str, int]]:
    recipe = target.recipe
    urls = [target.url("buffer"), target.url("reward"), recipe.buffer.redis_url, recipe.store.endpoint_url]
    parts = [urlsplit(url) for url in urls if url is not None]
    return {(part.hostname or "localhost", part.port or _PORTS[part.scheme]) for part in parts if part.scheme in _PORTS}


def _shown_by(host: str, port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # nothing is sent, and an expired certificate has to be seen as well
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port), timeout=CALL_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def _judge(what: str, until_s: float) -> CheckResult:
    left_days = (until_s - time.time()) / _DAY_S
    day = datetime.fromtimestamp(until_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    fix = "renew it: servers read changed files by themselves; docs/security.md, TLS, says how"
    if left_days <= 0:
        return fail("tls-certificate", f"{what} has expired at {day}", fix)
    if left_days < WARN_DAYS:
        return warn("tls-certificate", f"{what} expires in {left_days:.1f} days, at {day}", fix)
    return ok("tls-certificate", f"{what} is valid until {day}")
