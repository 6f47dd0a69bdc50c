"""The secrets that each pod of the chart and each service of Compose sees: the table of docs/security.md, as data."""

from __future__ import annotations

import configparser
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tba.tokens import ROLES, is_digest, load_role_tokens

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Seen:
    """The secrets that one pod or service sees.

    Attributes:
        sends: roles whose token it has, and so could send.
        checks: whether it has the digests of all other roles' tokens.
        store: the keys of the object store: "read", "write", both for the store itself, or none.
        other: other secrets.
    """

    sends: frozenset[str] = frozenset()
    checks: bool = False
    store: str = "none"
    other: str = "none"


SEEN = {
    "buffer": Seen(frozenset({"searcher"}), checks=True, store="write", other="password of Redis"),
    "reward": Seen(checks=True),
    "reward with needsModels": Seen(checks=True, store="read"),
    "searcher": Seen(frozenset({"searcher"}), store="read"),
    "trainer": Seen(frozenset({"trainer"}), store="write"),
    "setup": Seen(frozenset({"operator"}), store="write"),
    "setup-models": Seen(store="write", other="token of the hub"),
    "setup-prompts": Seen(frozenset({"operator"}), store="write"),
    "stop": Seen(),
    "test": Seen(frozenset({"searcher", "viewer"})),
    "redis": Seen(other="password of Redis"),
    "objectstore": Seen(store="both"),
    "grafana": Seen(other="password of Grafana"),
}
"""Component of the chart or service of Compose -> the secrets that it sees; all others see nothing."""


def make_secrets(folder: Path, *args: str) -> str:
    """Run deploy/make-secrets and return its output."""
    command = [str(ROOT / "deploy/make-secrets"), str(folder), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tokens_seen(files: list[Path]) -> tuple[frozenset[str], bool]:
    """Return the roles whose token is in the files, and whether the files have a token or digest of every role."""
    found = {role: tokens for file in files for role, tokens in load_role_tokens(file).items()}
    sends = frozenset(role for role, tokens in found.items() if not all(map(is_digest, tokens)))
    return sends, set(found) == set(ROLES)


def store_seen(access_key_ids: set[str]) -> str:
    """Return the rights on the object store of keys with these ids, as in `Seen.store`."""
    return {frozenset(): "none", frozenset({"tba"}): "write", frozenset({"tba-read"}): "read"}.get(
        frozenset(access_key_ids), "both"
    )


def access_key_id(file: Path) -> str:
    """Return the access key id in a credentials file of boto3."""
    found = configparser.ConfigParser()
    found.read_string(file.read_text())
    return found["default"]["aws_access_key_id"]


def secrets_of_kubernetes(folder: Path) -> dict[str, dict[str, str]]:
    """Run deploy/make-secrets for Kubernetes; return the name of each Secret -> its keys and values."""
    made = json.loads(make_secrets(folder, "--kubernetes", "lab"))
    assert {item["metadata"]["namespace"] for item in made["items"]} == {"lab"}
    return {item["metadata"]["name"]: item["stringData"] for item in made["items"]}
