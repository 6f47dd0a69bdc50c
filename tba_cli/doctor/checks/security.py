"""Check tokens and certificates.

Tokens: the tokens file, and whether the services accept its tokens and no others.
Certificates: how long those are valid that the addresses of the recipe show.
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
from urllib.parse import urlsplit

from tba.errors import ConfigError
from tba.tls import is_loopback
from tba.tokens import ROLES, RoleTokens, is_digest, load_role_tokens
from tba_cli.doctor.target import ASKED, CALL_TIMEOUT_S, Answer, CheckResult, Target, fail, ok, skip, warn

WARN_DAYS = 14
_DAY_S = 86_400.0
_PORTS = {"https": 443, "rediss": 6379}
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
        yield warn("tokens", f"{text}; there is none for {', '.join(missing)}", "add it to the file")
    else:
        yield ok("tokens", text)
    found = path.stat()
    mode, is_open = found.st_mode, all(folder.stat().st_mode & stat.S_IXOTH for folder in path.absolute().parents)
    if mode & stat.S_IWOTH:
        yield fail("tokens-mode", f"anybody may change {path} (mode {stat.filemode(mode)})", f"chmod o-w {path}")
    # what is mounted into a container belongs to somebody else
    elif plain and is_open and mode & stat.S_IROTH and found.st_uid == os.geteuid():
        yield warn("tokens-mode", f"anybody here may read {path} (mode {stat.filemode(mode)})", f"chmod o-r {path}")


def _accepted(target: Target, tokens: RoleTokens) -> Iterator[CheckResult]:
    for service in ASKED:
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
    for service in ASKED:
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
    """Check how long the certificate is valid that each https and rediss address shows."""
    for host, port, ca_file in sorted(_addresses(target), key=str):
        where = f"the certificate that {host}:{port} shows"
        try:
            until_s = ssl.cert_time_to_seconds(_shown_by(host, port, ca_file))
        except OSError as error:  # the check of that service says why it is not accepted
            yield skip("tls-certificate", f"{where}: not seen ({str(error)[:200] or type(error).__name__})")
            continue
        left_days = (until_s - time.time()) / _DAY_S
        text = f"{where} is valid until {datetime.fromtimestamp(until_s, UTC):%Y-%m-%d %H:%M UTC}"
        if left_days < WARN_DAYS:
            fix = "renew it: servers read changed files by themselves; docs/security.md, TLS, says how"
            yield warn("tls-certificate", f"{text}, for {left_days:.1f} days", fix)
        else:
            yield ok("tls-certificate", text)


def _addresses(target: Target) -> set[tuple[str, int, str | None]]:
    recipe = target.recipe
    urls = [(url, recipe.tls.ca_file) for url in (target.url("buffer"), target.url("reward"), recipe.buffer.redis_url)]
    urls.append((recipe.store.endpoint_url, recipe.store.ca_file))
    parts = [(urlsplit(url), ca_file) for url, ca_file in urls if url is not None]
    return {
        (part.hostname or "localhost", part.port or _PORTS[part.scheme], ca_file)
        for part, ca_file in parts
        if part.scheme in _PORTS
    }


def _shown_by(host: str, port: int, ca_file: str | None) -> str:
    context = ssl.create_default_context(cafile=ca_file)
    with (
        socket.create_connection((host, port), timeout=CALL_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return str((secure.getpeercert() or {})["notAfter"])
