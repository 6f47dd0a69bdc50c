"""`tba doctor` says in time that a certificate ends."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from tba_cli.doctor.checks import security
from tba_cli.doctor.checks.security import check_certificates
from tba_cli.doctor.target import CheckResult, Target
from tests.support.buffer import make_recipe

TLS = Path(__file__).parents[2] / "data" / "tls"
END_S = ssl.cert_time_to_seconds("Oct 29 04:41:51 2126 GMT")
"""The end of server.crt."""


def look(**sections: Any) -> list[CheckResult]:
    recipe = make_recipe(**{"buffer": {"port": 0}, "reward": {"port": 0}, **sections})
    return list(check_certificates(Target(recipe, frozenset({"buffer"}), False, False)))


@contextmanager
def shown(name: str) -> Iterator[int]:
    """The port of a server that shows one certificate, once."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / f"{name}.crt", TLS / f"{name}.key")
    with create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)

        def greet() -> None:
            connection, _ = listening.accept()
            with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(60)


def test_what_addresses_show_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look() == []
    authority = {"ca_file": str(TLS / "authority.crt")}
    for days, level in ((15, "ok"), (13.5, "warn")):
        with shown("server") as port, monkeypatch.context() as patch:
            patch.setattr(security.time, "time", lambda days=days: END_S - days * 86_400)
            (found,) = look(tls=authority, buffer={"redis_url": f"rediss://127.0.0.1:{port}/0"})
        assert (found.level, f"127.0.0.1:{port} shows is valid until 2126-" in found.found) == (level, True), found
    assert found.found.endswith(", for 13.5 days")


def test_what_cannot_be_seen_is_left_to_the_check_of_the_service() -> None:
    with shown("expired") as port:
        (found,) = look(tls={"ca_file": str(TLS / "authority.crt")}, reward={"url": f"https://127.0.0.1:{port}"})
    assert (found.level, "certificate has expired" in found.found) == ("skip", True), found
