"""TLS: a service's certificate and its renewal, the servers that clients trust, and the message when they do not."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from tba import watched_file
from tba.clients.service_client import ServiceClient
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, TlsError, UnauthorizedError, UnavailableError
from tba.server.serve import Certificate
from tba.tokens import client_token, server_tokens
from tba_cli.local.services import wait_until_ready
from tests.support.served_app import TLS_FOLDER, ServedApp
from tests.support.waits import until

AUTHORITY = TLS_FOLDER / "authority.crt"
TOKENS = {"searcher": "searcher-token-0123456789"}


def install(name: str, folder: Path) -> tuple[str, str]:
    """Copy a pair to where the service reads it."""
    for suffix in ("crt", "key"):
        shutil.copy(TLS_FOLDER / f"{name}.{suffix}", folder / f"tls.{suffix}")
    return str(folder / "tls.crt"), str(folder / "tls.key")


def ask(served: ServedApp, url: str | None = None, ca: Path | None = AUTHORITY) -> str:
    client = ServiceClient(
        url or served.url, token=TOKENS["searcher"], retry_s=0, timeout_s=60, ca_file=None if ca is None else str(ca)
    )
    try:
        return json.loads(client._call("GET", "/v1/small").content)["status"]
    finally:
        client.close()


def is_served(served: ServedApp) -> bool:
    try:
        return ask(served) == "ok"
    except UnavailableError:
        return False


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(TOKENS, Certificate(*install("server", tmp_path))) as app:
        yield app


def test_clients_trust_the_authority_of_the_recipe_alone(served: ServedApp) -> None:
    assert ask(served) == "ok"
    assert ask(served, served.url.replace("127.0.0.1", "localhost")) == "ok"
    asyncio.run(wait_until_ready(served.url, str(AUTHORITY)))
    with pytest.raises(TlsError, match="is not accepted"):
        asyncio.run(wait_until_ready(served.url, str(TLS_FOLDER / "other.crt")))
    for untrusted in (TLS_FOLDER / "other.crt", None):
        with pytest.raises(TlsError, match=r"is not accepted \(.*\); .* tls.ca_file .* the authority"):
            ask(served, ca=untrusted)
    with pytest.raises(UnavailableError, match="its address begins with https://"):
        ask(served, served.url.replace("https", "http"))
    with pytest.raises(ConfigError, match="holds no certificate in PEM format"):
        ask(served, ca=TLS_FOLDER / "README.md")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ask(served, ca=TLS_FOLDER / "nowhere.crt")
    with ServedApp(TOKENS) as plain, pytest.raises(TlsError, match=r"does not speak TLS .*; write http:// for it"):
        ask(plain, plain.url.replace("http", "https"))


def test_a_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    certificate = Certificate(*install("elsewhere", tmp_path))
    with ServedApp(TOKENS, certificate) as app, pytest.raises(TlsError, match="name this host in its subjectAltName"):
        ask(app)


def test_a_renewed_certificate_is_shown_without_a_restart(
    served: ServedApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Mock()
    monkeypatch.setattr(watched_file, "log", said)
    old = served.serial_number(AUTHORITY)
    shutil.copy(TLS_FOLDER / "renewed.crt", tmp_path / "tls.crt")  # the key is not there yet
    until("the half-renewed pair is noticed", lambda: said.error.called)
    assert "are not a matching PEM certificate and key" in str(said.error.call_args)
    assert served.serial_number(AUTHORITY) == old
    shutil.copy(TLS_FOLDER / "renewed.key", tmp_path / "tls.key")
    until("the renewed certificate is shown", lambda: served.serial_number(AUTHORITY) != old)
    assert ask(served) == "ok"


def test_a_client_that_had_answers_waits_for_a_renewal(served: ServedApp, tmp_path: Path) -> None:
    client = ServiceClient(served.url, token=TOKENS["searcher"], retry_s=0, timeout_s=60, ca_file=str(AUTHORITY))

    def answers() -> str:
        pool = client._http.pool
        assert pool is not None
        if (kept := pool.get(block=False)) is not None:
            kept.close()
        pool.put(None)  # over a new connection
        try:
            return json.loads(client._call("GET", "/v1/small").content)["status"]
        except UnavailableError as error:  # and not TlsError, for which there is no retry
            return str(error)

    assert answers() == "ok"
    install("expired", tmp_path)
    until("the expired certificate is shown", lambda: "has expired" in answers())
    install("server", tmp_path)
    until("the renewed one is", lambda: answers() == "ok")
    client.close()


def test_clients_that_never_end_their_handshake_hold_up_nobody(tmp_path: Path) -> None:
    with ServedApp(TOKENS, Certificate(*install("server", tmp_path))) as app, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(app.connect())
        until("a client that ends it is served", lambda: is_served(app))  # in time, on a slow machine too


def test_a_pair_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    cert, key = install("server", tmp_path)
    with pytest.raises(ConfigError, match=r"tls.key_file .*nowhere.key cannot be read"):
        Certificate(cert, str(tmp_path / "nowhere.key"))
    with pytest.raises(ConfigError, match="are not a matching PEM certificate and key"):
        Certificate(str(TLS_FOLDER / "renewed.crt"), key)
    with pytest.raises(ConfigError, match="are not a matching PEM certificate and key"):
        Certificate(str(TLS_FOLDER / "README.md"), key)


def test_tokens_change_under_a_client_that_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which two sides see a new file does not matter while the old token is in it too."""
    monkeypatch.setattr(watched_file, "RECHECK_S", 0.0)
    old, new = "old-token-0123456789", "new-token-0123456789"
    here, there = tmp_path / "server.json", tmp_path / "client.json"

    def write(path: Path, tokens: object) -> None:
        path.write_text(json.dumps({"searcher": tokens}))

    for path in (here, there):
        write(path, old)
    with ServedApp(server_tokens(here)) as app:
        client = ServiceClient(app.url, token=client_token(there, "searcher"), retry_s=0, timeout_s=60)

        def is_let_in() -> bool:
            return json.loads(client._call("GET", "/v1/small").content) == {"status": "ok"}

        assert is_let_in()
        for path, known in ((there, [new, old]), (here, [new, old]), (here, new), (there, new)):
            write(path, known)
            assert is_let_in(), f"{path.name} has {known}"
        write(here, "a-third-token-0123456789")
        with pytest.raises(UnauthorizedError, match="the tokens are being changed"):
            is_let_in()
        target = ServiceClient(app.url, token=client_token(there, "searcher"), retry_s=0, timeout_s=60)
        with pytest.raises(UnauthorizedError, match="unknown here"):  # it was never let in: this file is wrong
            target._call("GET", "/v1/small")
        client.close()
        target.close()


def test_a_client_whose_file_comes_later_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file without the old token comes later: Kubernetes brings a changed Secret to each pod at another time."""
    monkeypatch.setattr(watched_file, "RECHECK_S", 0.0)
    here, there = tmp_path / "server.json", tmp_path / "client.json"
    for path in (here, there):
        path.write_text(json.dumps({"searcher": "old-token-0123456789"}))
    with ServedApp(server_tokens(here)) as app:
        client = ServiceClient(app.url, token=client_token(there, "searcher"), retry_s=60, timeout_s=60)
        client._call("GET", "/v1/small")
        here.write_text(json.dumps({"searcher": "new-token-0123456789"}))
        refused = Mock(wraps=client._attempt)
        monkeypatch.setattr(client, "_attempt", refused)

        async def wait() -> None:
            call = asyncio.create_task(asyncio.to_thread(client._call, "GET", "/v1/small"))
            while refused.call_count < 2:  # it was refused once, and tries again
                await asyncio.sleep(0.01)
            there.write_text(json.dumps({"searcher": "new-token-0123456789"}))
            await call

        asyncio.run(wait())
        client.close()


def recipe(text: str, folder: Path) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text('run.name = "x"\nmodel.path = "m"\ndata.generator = "addition"\n' + text)
    return load_recipe(path, environ={})


def test_a_certificate_makes_the_addresses_https_and_half_a_pair_is_refused(tmp_path: Path) -> None:
    both = recipe('tls.cert_file = "c"\ntls.key_file = "k"\nreward.url = "http://proxy:1"\n', tmp_path)
    assert (both.buffer_url, both.reward_url) == ("https://127.0.0.1:8700", "http://proxy:1")
    assert recipe("", tmp_path).buffer_url == "http://127.0.0.1:8700"
    with pytest.raises(ConfigError, match=r"tls.cert_file is given without tls.key_file"):
        recipe('tls.cert_file = "c"\n', tmp_path)


def test_the_reward_service_does_not_listen_openly_without_tokens(tmp_path: Path) -> None:
    from tba_reward.__main__ import run

    with pytest.raises(ConfigError, match=r"refusing to listen on 0.0.0.0 without tokens"):
        run(recipe('reward.host = "0.0.0.0"\nreward.tasks = {}\n', tmp_path))
