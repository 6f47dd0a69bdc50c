"""The tokens file: two tokens while one is changed, read again when it changes, never half-way."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tba import watched_file
from tba.errors import ConfigError, UnauthorizedError
from tba.server import Authenticator
from tba.tokens import (
    ClientToken,
    client_token,
    load_role_tokens,
    load_tokens,
    operator_client_token,
    operator_token,
    server_tokens,
    token_digest,
)
from tba_cli.doctor.checks.security import check_tokens
from tba_cli.doctor.target import target_of
from tests.support.buffer import make_recipe

OLD, NEW, OTHER = "old-token-0123456789", "new-token-0123456789", "operator-0123456789"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "RECHECK_S", 0.0)


def write(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def sent_by(path: Path) -> ClientToken:
    token = client_token(path, "searcher")
    assert token is not None
    return token


def sent_by_operator(path: Path | str) -> tuple[str, ...]:
    token = operator_client_token(path)
    assert token is not None
    return token.value


def test_a_role_may_have_two_tokens_and_the_first_is_sent(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.json", {"searcher": [NEW, OLD], "operator": OTHER})
    assert load_tokens(path) == {"searcher": NEW, "operator": OTHER}
    assert load_role_tokens(path) == {"searcher": (NEW, OLD), "operator": (OTHER,)}
    assert operator_token(path) == OTHER
    auth = Authenticator(server_tokens(path))
    assert [auth.role_of(f"Bearer {token}") for token in (OLD, NEW, OTHER)] == ["searcher", "searcher", "operator"]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"searcher": []}, "searcher has 0 tokens; it needs one, or 2 while it is changed"),
        ({"searcher": [OLD, NEW, OTHER]}, "searcher has 3 tokens"),
        ({"searcher": [OLD, OLD]}, "has one twice"),
        ({"searcher": OLD, "operator": [OTHER, OLD]}, "two roles share a token"),
        ({"searcher": "short"}, "16 characters or more"),
        ({"searcher": "with a blank in it!"}, "an HTTP header cannot carry"),
        ({"searcher": "tokén-with-an-accent"}, "an HTTP header cannot carry"),
        ({"searcher": 5}, "must be a text"),
        ({"searcher": "sha256:0123456789abcdef"}, "64 lower-case hexadecimal digits do not follow"),
        ({"searcher": OLD, "operator": token_digest(OLD)}, "two roles share a token"),
        ({"searcher": [OLD, token_digest(OLD)]}, "has one twice"),
        ({"reader": OLD}, "must map roles"),
        ([], "must map roles"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path: Path, document: Any, says: str) -> None:
    path = write(tmp_path / "tokens.json", document)
    with pytest.raises(ConfigError, match=says):
        server_tokens(path)


def test_a_digest_checks_a_token_and_cannot_be_sent(tmp_path: Path) -> None:
    digest = token_digest(OLD)
    path = write(tmp_path / "tokens.json", {"searcher": [NEW, digest], "operator": token_digest(OTHER)})
    auth = Authenticator(server_tokens(path))
    assert [auth.role_of(f"Bearer {token}") for token in (OLD, NEW, OTHER)] == ["searcher", "searcher", "operator"]
    for stolen in (digest, digest.removeprefix("sha256:"), token_digest(OTHER)):
        with pytest.raises(UnauthorizedError):
            auth.role_of(f"Bearer {stolen}")
    assert sent_by(path).value == (NEW,)
    assert load_tokens(path) == {"searcher": NEW}
    with pytest.raises(ConfigError, match="has only the digest of the token of 'operator'"):
        client_token(path, "operator")
    with pytest.raises(ConfigError, match="must hold one token"):
        operator_token(path)
    viewer = write(tmp_path / "both.json", {"operator": digest, "viewer": NEW})
    assert operator_token(viewer) == NEW


def test_what_a_server_remembers_is_no_token(tmp_path: Path) -> None:
    file = server_tokens(write(tmp_path / "tokens.json", {"searcher": [NEW, OLD]}))
    assert file is not None
    assert file.value == {"searcher": (token_digest(NEW), token_digest(OLD))}
    assert token_digest(token_digest(NEW)) == token_digest(NEW)


def test_a_token_file_may_come_on_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (f"{OLD}\n", json.dumps({"operator": OLD})):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert sent_by_operator("-") == (OLD,)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="the token file on stdin must hold one token"):
        operator_client_token("-")


def test_a_changed_file_holds_at_once_and_old_tokens_die(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.json", {"searcher": OLD, "operator": OTHER})
    auth, sent = Authenticator(server_tokens(path)), sent_by(path)
    assert auth.role_of(f"Bearer {OLD}") == "searcher"
    write(path, {"searcher": [NEW, OLD], "operator": OTHER})
    assert auth.role_of(f"Bearer {NEW}") == auth.role_of(f"Bearer {OLD}") == "searcher"
    assert sent.value == (NEW, OLD)
    write(path, {"searcher": NEW, "operator": OTHER})
    with pytest.raises(UnauthorizedError):
        auth.role_of(f"Bearer {OLD}")
    assert auth.role_of(f"Bearer {NEW}") == "searcher"
    assert sent.value == (NEW,)


@pytest.mark.parametrize("broken", ['{"searcher": "new-tok', "", "[]", '{"searcher": "short"}', None])
def test_a_broken_new_file_keeps_the_old_tokens_and_says_so_once(tmp_path: Path, broken: Any, monkeypatch) -> None:
    said = Mock()
    monkeypatch.setattr(watched_file, "log", said)
    path = write(tmp_path / "tokens.json", {"searcher": OLD})
    auth, sent = Authenticator(server_tokens(path)), sent_by(path)
    if broken is None:
        path.unlink()
    else:
        write(path, broken)
    for _ in range(3):
        assert auth.role_of(f"Bearer {OLD}") == "searcher"
        assert sent.value == (OLD,)
    assert said.error.call_count == 2, "once by the server, once by the client"
    assert "new-tok" not in str(said.mock_calls)
    assert OLD not in str(said.mock_calls)
    write(path, {"searcher": NEW})
    assert auth.role_of(f"Bearer {NEW}") == "searcher"
    assert sent.value == (NEW,)


def test_a_file_that_could_not_be_read_for_a_moment_is_read_later(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "tokens.json", {"searcher": OLD})
    sent = sent_by(path)
    write(path, {"searcher": NEW})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", Mock(side_effect=OSError(24, "Too many open files")))
        assert sent.value == (OLD,)
    assert sent.value == (NEW,)  # and the file has not changed since


def test_a_file_that_a_link_leads_to_elsewhere_is_read_again(tmp_path: Path) -> None:
    """So Kubernetes updates a mounted Secret."""
    for name, token in (("v1", OLD), ("v2", NEW)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "tokens.json", {"searcher": token})
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "tokens.json").symlink_to("data/tokens.json")
    auth = Authenticator(server_tokens(tmp_path / "tokens.json"))
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").rename(tmp_path / "data")
    assert auth.role_of(f"Bearer {NEW}") == "searcher"


def test_a_person_may_have_a_file_with_one_token(tmp_path: Path) -> None:
    path = write(tmp_path / "token", f"{OLD}\n")
    assert sent_by_operator(path) == (OLD,)
    for wrong in ("", "two words", '{"searcher": "x"}'):
        with pytest.raises(ConfigError, match="must hold one token"):
            operator_client_token(write(path, wrong))
    with pytest.raises(ConfigError, match="token file"):
        operator_token(write(path, "{broken"))
    for text, token in (('{"viewer": "vvv", "operator": "ooo"}', "ooo"), ('{"viewer": "vvv"}', "vvv")):
        assert operator_token(write(path, text)) == token
    assert operator_client_token(None) is None
    assert client_token(None, "searcher") is None
    assert server_tokens(None) is None


@pytest.mark.parametrize(
    ("host", "service"), [("127.0.0.1", "buffer"), ("127.0.0.1", None), ("0.0.0.0", None), ("::", None)]
)
def test_a_local_run_without_a_tokens_file_makes_its_own_and_it_is_said(tmp_path, monkeypatch, host, service) -> None:
    monkeypatch.chdir(tmp_path)
    (result,) = check_tokens(target_of(make_recipe(buffer={"host": host}), service=service))
    assert (result.level, "makes tokens of its own" in result.found) == ("ok", True)
