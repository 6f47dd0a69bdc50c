"""`tba doctor` says in time that a certificate ends."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from tba_cli.doctor.checks import security
from tba_cli.doctor.checks.security import check_certificates, not_after_s
from tba_cli.doctor.target import CheckResult, Target
from tests.support.buffer import make_recipe

TLS = Path(__file__).parents[2] / "data" / "tls"


def look(**sections: Any) -> list[CheckResult]:
    recipe = make_recipe(**{"buffer": {"port": 0}, "reward": {"port": 0}, **sections})
    return list(check_certificates(Target(recipe, frozenset({"buffer"}), False, False)))


def files(name: str) -> dict[str, object]:
    return {"cert_file": str(TLS / f"{name}.crt"), "key_file": str(TLS / f"{name}.key")}


@contextmanager
def shown(name: str) -> Iterator[int]:
    """The port of a server that shows one certificate, once."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / f"{name}.crt", TLS / f"{name}.key")
    with create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)

        def greet() -> None:
            connection, _ = listening.accept()
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(60)


@pytest.mark.parametrize("name", ["server", "expired", "authority"])
def test_the_end_of_a_certificate_is_read_as_openssl_reads_it(name: str) -> None:
    path = TLS / f"{name}.crt"
    said = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", path], capture_output=True, check=True)
    expected_s = ssl.cert_time_to_seconds(said.stdout.decode().partition("=")[2].strip())
    assert not_after_s(ssl.PEM_cert_to_DER_cert(path.read_text())) == expected_s


@pytest.mark.parametrize("data", [b"", b"\x30", b"\x30\x82\xff\xff\x00", b"\x30\x03\x02\x01\x01"])
def test_what_is_no_certificate_is_said(data: bytes) -> None:
    with pytest.raises(ValueError, match="holds no certificate that can be read"):
        not_after_s(data)


def test_a_file_is_judged_by_the_first_of_its_chain_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look() == []
    (found,) = look(tls=files("server"))
    assert (found.code, found.level) == ("tls-certificate", "ok")
    chain = tmp_path / "chain.crt"
    chain.write_text((TLS / "server.crt").read_text() + (TLS / "expired.crt").read_text())
    (found,) = look(tls={**files("server"), "cert_file": str(chain)})
    assert (found.level, "has expired at 2020-02-01" in found.found) == ("fail", True)
    end_s = not_after_s(ssl.PEM_cert_to_DER_cert((TLS / "server.crt").read_text()))
    monkeypatch.setattr(security.time, "time", lambda: end_s - 13.5 * 86_400)
    (found,) = look(tls=files("server"))
    assert (found.level, "expires in 13.5 days" in found.found) == ("warn", True)
    chain.write_text("nothing")
    (found,) = look(tls={**files("server"), "cert_file": str(chain)})
    assert (found.level, "no certificate in PEM format" in found.found) == ("fail", True)
    (found,) = look(tls={**files("server"), "cert_file": str(tmp_path / "gone.crt")})
    assert found.level == "skip"


def test_what_addresses_show_is_judged_though_nobody_would_accept_it() -> None:
    with shown("expired") as port, create_server(("127.0.0.1", 0)) as silent:
        nobody = silent.getsockname()[1]
        silent.close()
        found = look(
            buffer={"url": f"http://127.0.0.1:{port}", "redis_url": f"rediss://127.0.0.1:{port}/0"},
            reward={"url": f"https://127.0.0.1:{nobody}"},
        )
    levels = {result.found.split()[3]: result.level for result in found}
    assert levels == {f"127.0.0.1:{port}": "fail", f"127.0.0.1:{nobody}": "skip"}
