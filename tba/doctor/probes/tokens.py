"""The tokens file, and whether the services take its tokens and no others."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tba.doctor.finding import Finding, fail, ok, skip, warn
from tba.doctor.patient import Answer, Patient
from tba.errors import ConfigError
from tba.loopback import is_loopback
from tba.tokens import ROLES, RoleTokens, is_digest, load_role_tokens

NEEDED_BY = {
    "searcher": "searchers, and the buffer for the reward service",
    "trainer": "the trainer",
    "operator": "`tba setup`, `tba pause` and the like",
    "viewer": "people and dashboards that only look",
}
LOOKS = {"buffer": "/v1/run", "reward": "/v1/rewards"}
"""A call of each service that changes nothing."""
MAY_LOOK = {"buffer": ROLES, "reward": ("searcher", "operator", "viewer")}
MEND_FILE = "make the file anew (docs/operations.md, Tokens): a JSON map of four roles, 16 characters or more each"


def probe_tokens(patient: Patient) -> Iterator[Finding]:
    """Tokens by role."""
    path, recipe = patient.recipe.auth.tokens_file, patient.recipe
    if path is None and patient.is_local:
        yield ok("tokens", "there is no auth.tokens_file: every start of `tba run` makes tokens of its own")
        return
    if path is None:
        hosts = {recipe.buffer.host, recipe.reward.host}
        if all(map(is_loopback, hosts)):
            yield ok("tokens", "there is no auth.tokens_file: services listen on loopback alone and ask for no token")
        else:
            yield fail("tokens", "auth.tokens_file is not set, and services listen beyond loopback", MEND_FILE)
        yield from _strangers(patient, have_tokens=False)
        return
    try:
        tokens = load_role_tokens(path)
    except ConfigError as error:
        yield fail("tokens", str(error), f"{MEND_FILE}; in a container, check that the Secret is mounted there")
        return
    yield from _file(Path(path), tokens)
    yield from _accepted(patient, tokens)
    yield from _strangers(patient, have_tokens=True)


def _file(path: Path, tokens: RoleTokens) -> Iterator[Finding]:
    plain = [token for several in tokens.values() for token in several if not is_digest(token)]
    text = f"{path}: {len(tokens)} of {len(ROLES)} roles"
    if plain:
        text += f", tokens of {min(map(len, plain))} characters or more"
    # a file with one token is that of one client; a service that checks tokens has to know all roles
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
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        yield fail("tokens-mode", f"anybody may change {path} (mode {stat.filemode(mode)})", f"chmod o-w {path}")


def _accepted(patient: Patient, tokens: RoleTokens) -> Iterator[Finding]:
    services: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
    for service in services:
        refused, accepted = [], []
        tried = {role: [x for x in tokens.get(role, ()) if not is_digest(x)] for role in MAY_LOOK[service]}
        if not any(tried.values()):
            yield skip("tokens-accepted", f"of the tokens of the {service} service the file has digests, if any")
            continue
        for role, sent in tried.items():
            answers = [patient.ask(service, LOOKS[service], token=token) for token in sent]
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
            yield ok("tokens-accepted", f"the {service} service takes the tokens of {', '.join(accepted)}")
        else:
            yield skip("tokens-accepted", f"the {service} service does not answer, so its tokens are not tried")


def _strangers(patient: Patient, *, have_tokens: bool) -> Iterator[Finding]:
    services: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
    for service in services:
        answer = patient.ask(service, LOOKS[service], token=f"wrong-{secrets.token_hex(12)}")
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
                f"the {service} service lets an unknown token in: it runs without tokens",
                f"give the {service} service auth.tokens_file and start it again",
            )
