"""Check the tokens file, and whether the services accept its tokens and no others."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tba.clients.service_client import Reply
from tba.errors import ConfigError
from tba.tls import is_loopback
from tba.tokens import ROLES, RoleTokens, is_digest, load_role_tokens
from tba_cli.doctor.target import ASKED, CheckResult, Target, fail, ok, skip, warn

READ_PATHS = {"buffer": "/v1/run", "reward": "/v1/rewards"}
"""For each service a path that the checks GET, which changes nothing."""
READERS = {"buffer": ROLES, "reward": ("searcher", "operator", "viewer")}
"""For each service the roles that may read its path in READ_PATHS."""
FIX_TOKENS_FILE = "make the file again (docs/security.md, Tokens): a JSON map of four roles, 16 characters or more each"


def check_tokens(target: Target) -> Iterator[CheckResult]:
    """Check the tokens file and its mode, and send its tokens to the services."""
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
        for service in ASKED:
            if _status(target, service, READ_PATHS[service], "none") == 401:
                yield fail(
                    "tokens-refused",
                    f"the {service} service asks for a token, and the recipe here names no auth.tokens_file",
                    "set auth.tokens_file to the file of the services",
                )
        return
    try:
        tokens = load_role_tokens(path)
    except ConfigError as error:
        yield fail("tokens", str(error), f"{FIX_TOKENS_FILE}; in a container, check that the Secret is mounted there")
        return
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
    file = Path(path)
    found = file.stat()
    mode, is_open = found.st_mode, all(folder.stat().st_mode & stat.S_IXOTH for folder in file.absolute().parents)
    if mode & stat.S_IWOTH:
        yield fail("tokens-mode", f"anybody may change {path} (mode {stat.filemode(mode)})", f"chmod o-w {path}")
    # what is mounted into a container belongs to somebody else
    elif plain and is_open and mode & stat.S_IROTH and found.st_uid == os.geteuid():
        yield warn("tokens-mode", f"anybody here may read {path} (mode {stat.filemode(mode)})", f"chmod o-r {path}")
    yield from _asked(target, tokens)


def _asked(target: Target, tokens: RoleTokens) -> Iterator[CheckResult]:
    """Send each service an unknown token and the plain-text tokens of its READERS; yield whether it accepts them."""
    for service in ASKED:
        path = READ_PATHS[service]
        unknown = _status(target, service, path, f"wrong-{secrets.token_hex(12)}")
        if unknown is None:
            yield skip("tokens-accepted", f"the {service} service does not answer, so its tokens are not checked")
            continue
        if unknown == 200:
            fix = f"give the {service} service auth.tokens_file and start it again"
            yield fail("tokens-refused", f"the {service} service runs without tokens: it accepts an unknown one", fix)
            continue
        if unknown == 401:
            yield ok("tokens-refused", f"the {service} service refuses an unknown token")
        sent = {role: [x for x in tokens.get(role, ()) if not is_digest(x)] for role in READERS[service]}
        found = {role: {_status(target, service, path, token) for token in several} for role, several in sent.items()}
        accepted = [role for role, statuses in found.items() if 200 in statuses]
        refused = [role for role, statuses in found.items() if 200 not in statuses and statuses & {401, 403}]
        if refused:
            yield fail(
                "tokens-accepted",
                f"the {service} service refuses the tokens of {', '.join(refused)} (401)",
                f"give the {service} service the same file as here; it reads a changed file again by itself",
            )
        elif accepted:
            yield ok("tokens-accepted", f"the {service} service accepts the tokens of {', '.join(accepted)}")
        else:
            yield skip("tokens-accepted", f"of the tokens of the {service} service the file has digests, if any")


def _status(target: Target, service: Literal["buffer", "reward"], path: str, token: str) -> int | None:
    answer = target.ask(service, path, token=token)
    return answer.status if isinstance(answer, Reply) else None
