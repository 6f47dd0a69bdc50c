"""S3 over a network that fails: refusals, lost answers, cut transfers, a killed server."""

from __future__ import annotations

import fcntl
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import HTTPClientError, SSLError

from tba.config.sections import StoreSection
from tba.errors import ObjectExistsError, ObjectNotFoundError, StoreTlsError, StoreUnavailableError
from tba.store import ObjectStore, open_store
from tba.store.s3 import S3Store
from tba.store.s3_errors import is_transient, store_error
from tests.contract.conftest import BUCKET
from tests.support.redis_process import free_port
from tests.support.s3_server import SOCKETS, FaultyProxy, S3Server
from tests.support.served_app import TLS_FOLDER


def at(section: StoreSection, endpoint_url: str, **changes: Any) -> ObjectStore:
    return open_store(section.model_copy(update={"endpoint_url": endpoint_url}), **changes)


def small_parts(section: StoreSection, endpoint_url: str = "", part_bytes: int = 5 << 20) -> S3Store:
    """A store that sends files above 10 MiB in parts of 5 MiB, the least that S3 allows."""
    place = {"bucket": BUCKET, "prefix": section.url.partition(BUCKET + "/")[2], "region": "us-east-1"}
    return S3Store(**place, endpoint_url=endpoint_url or section.endpoint_url, timeout_s=5.0, part_bytes=part_bytes)


class Proxy(FaultyProxy):
    """Between the server and stores; `direct` is the same store without it."""

    def __init__(self, server: S3Server, section: StoreSection) -> None:
        super().__init__(server.port)
        self.section, self.direct = section, open_store(section)

    def store(self, timeout_s: float) -> ObjectStore:
        return at(self.section, self.url, timeout_s=timeout_s)


@pytest.fixture
def proxy(s3_server: S3Server, s3_section: StoreSection) -> Iterator[Proxy]:
    with Proxy(s3_server, s3_section) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: Proxy) -> ObjectStore:
    return proxy.store(5.0)


def test_a_missing_bucket_is_one_sentence(s3_section: StoreSection) -> None:
    store = open_store(s3_section.model_copy(update={"url": "s3://no-such-bucket/x"}))
    for call in (store.check, lambda: store.size_bytes("a"), lambda: store.put("a", b"1"), lambda: store.get("a")):
        with pytest.raises(StoreUnavailableError, match="bucket 'no-such-bucket' does not exist; create it"):
            call()


def test_an_endpoint_that_nobody_serves_is_one_sentence(s3_section: StoreSection) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    store = at(s3_section, url, timeout_s=0.5)
    with pytest.raises(StoreUnavailableError, match=rf"at {url}: no answer .*check that the server runs"):
        store.check()


def test_missing_credentials_are_one_sentence(s3_section: StoreSection, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    with pytest.raises(StoreUnavailableError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_store(s3_section).check()


def test_access_denied_is_one_sentence_and_is_not_retried(proxy: Proxy, proxied: ObjectStore) -> None:
    proxy.faults = [403]
    with pytest.raises(StoreUnavailableError, match=r"access denied .*AccessDenied.*check AWS_ACCESS_KEY_ID"):
        proxied.get("a")
    assert proxy.num_requests == 1


def test_a_server_that_redirects_everything_is_one_sentence(proxy: Proxy, proxied: ObjectStore) -> None:
    proxy.faults = [302] * 2000
    with pytest.raises(StoreUnavailableError, match=r"redirects every request.*correct store\.endpoint_url"):
        proxied.get("a")


def test_a_store_that_has_said_no_has_answered_and_its_certificate_is_waited_for(s3_section: StoreSection) -> None:
    store = small_parts(s3_section)
    expired = ssl.SSLCertVerificationError(1, "expired")
    expired.verify_code, expired.verify_message = 10, "certificate has expired"

    def shows_an_expired_certificate() -> bytes:
        raise SSLError(endpoint_url="https://s3.example.com", error=expired) from expired

    with pytest.raises(StoreTlsError, match="certificate has expired"):
        store._try("read", shows_an_expired_certificate)
    with pytest.raises(ObjectNotFoundError):
        store.get("nothing")
    with pytest.raises(SSLError):
        store._try("read", shows_an_expired_certificate)


def test_where_the_stack_ends_over_redirects_makes_no_difference() -> None:
    for error in (RecursionError("too deep"), HTTPClientError(error=RecursionError("too deep"))):
        assert not is_transient(error)
        asked: dict[str, Any] = {"verb": "read", "key": "a", "url": "s3://b", "endpoint": "http://h", "ca_file": None}
        assert "redirects every request" in str(store_error(error, **asked, timeout_s=5))


def test_a_server_that_stays_overloaded_is_given_up_at_the_deadline(proxy: Proxy) -> None:
    store = proxy.store(2.0)
    proxy.faults = [503] * 1000
    with pytest.raises(StoreUnavailableError, match=r"kept answering 503 SlowDown injected for 2 s"):
        store.put("a", b"1")
    assert proxy.num_requests > 1


def test_a_server_that_falls_silent_is_given_up_and_one_that_is_slow_is_not(proxy: Proxy, tmp_path: Path) -> None:
    slow, silent = proxy.store(3.0), proxy.store(0.3)
    proxy.direct.put("a", b"1" * 10_000)
    proxy.STALL_S, proxy.TRICKLE_S = 0.6, 4.0
    proxy.faults = ["stall"] * 100
    for attempt in (lambda: silent.put("b", b"1"), lambda: silent.get_file("a", tmp_path / "a")):
        with pytest.raises(StoreUnavailableError, match=r"after trying for 0\.3 s"):
            attempt()
    proxy.faults = ["trickle"]  # in all, longer than a silent server has
    assert slow.get("a") == b"1" * 10_000


@pytest.mark.parametrize("fault", [503, 409, "lose"])
def test_a_passing_failure_is_retried(proxy: Proxy, proxied: ObjectStore, fault: int | str) -> None:
    proxy.faults = [fault, fault]
    proxied.put("a", b"1")
    proxy.faults = [fault]
    assert proxied.get("a") == b"1"


def test_a_create_that_lost_its_answer_to_an_object_of_another_is_refused(proxy: Proxy, proxied: ObjectStore) -> None:
    proxy.direct.put("a", b"theirs")
    proxy.faults = [503]
    with pytest.raises(ObjectExistsError):
        proxied.put("a", b"mine", create_only=True)
    assert proxied.get("a") == b"theirs"


def test_a_create_whose_answer_was_lost_succeeds_on_retry(proxy: Proxy, proxied: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"mine" * 1000)
    proxy.faults = ["lose"]
    proxied.put_file("a", tmp_path / "source", create_only=True)
    proxy.faults = ["lose"]
    proxied.put("b", b"mine", create_only=True)
    assert (proxied.get("a"), proxied.get("b")) == (b"mine" * 1000, b"mine")


def test_a_transfer_that_is_cut_is_repeated_and_whole(proxy: Proxy, proxied: ObjectStore, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    proxied.put("a", data)
    proxy.faults = ["cut"]
    assert proxied.get("a") == data
    proxy.faults = [503, "cut"]
    proxied.get_file("a", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == data


def test_a_server_that_is_silent_about_a_file_costs_one_deadline(proxy: Proxy, tmp_path: Path) -> None:
    proxy.direct.put("a", b"1")
    store = proxy.store(0.3)
    proxy.STALL_S = 0.6
    for before in (0, 1):  # requests that are answered
        proxy.faults, proxy.num_requests = [*[None] * before, *["stall"] * 100], 0
        with pytest.raises(StoreUnavailableError, match=r"after trying for 0\.3 s"):
            store.get_file("a", tmp_path / "target")
        assert proxy.num_requests <= before + 1
    assert list(tmp_path.iterdir()) == []


def test_a_large_file_travels_in_parts_with_a_failure_on_the_way(proxy: Proxy, tmp_path: Path) -> None:
    store = small_parts(proxy.section, proxy.url)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom((11 << 20) + 17))
    proxy.faults = [503, 503, "lose"]
    store.put_file("big", source)
    assert proxy.num_requests >= 3 + 5, "three failures; then create, three parts, complete"
    store.get_file("big", target)
    assert target.read_bytes() == source.read_bytes()


def test_a_file_that_is_replaced_while_it_is_read_is_no_mixture(s3_section: StoreSection, tmp_path: Path) -> None:
    store = small_parts(s3_section)
    store.put("big", bytes(11 << 20))
    head = store._client.head_object

    def head_then_replaced(**where: str) -> Any:
        found = head(**where)
        store.put("big", b"1" * (11 << 20))
        return found

    store._client.head_object = head_then_replaced  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StoreUnavailableError, match="was replaced while it was read; try again"):
        store.get_file("big", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_fails_ends_the_others(proxy: Proxy, tmp_path: Path) -> None:
    proxy.direct.put("big", bytes(100))
    store = small_parts(proxy.section, proxy.url, part_bytes=1)
    proxy.STALL_S = 1.0
    proxy.faults = [None, "stall", *[403] * 99]
    with pytest.raises(StoreUnavailableError, match="access denied"):
        store.get_file("big", tmp_path / "target")
    assert proxy.num_requests <= 1 + 4 + 1, "HEAD, one of each connection, and the one that stalled again"
    assert list(tmp_path.iterdir()) == []


def test_create_only_holds_for_a_file_in_parts_and_leaves_no_upload(s3_section: StoreSection, tmp_path: Path) -> None:
    store, source = small_parts(s3_section), tmp_path / "source"
    source.write_bytes(bytes(11 << 20))
    store.put("big", b"first")
    with pytest.raises(ObjectExistsError):
        store.put_file("big", source, create_only=True)
    assert store.get("big") == b"first"
    prefix = s3_section.url.partition(BUCKET + "/")[2]
    assert "Uploads" not in store._client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)


def test_a_server_that_ignores_create_only_fails_the_check(proxy: Proxy, proxied: ObjectStore) -> None:
    proxy.drop_headers = {"if-none-match"}
    proxied.check()
    with pytest.raises(StoreUnavailableError, match="ignores `If-None-Match"):
        proxied.check(write=True)


def test_what_was_written_survives_a_killed_server(tmp_path: Path, s3_server: S3Server) -> None:
    server = S3Server(tmp_path / "server")
    server.start()
    try:
        server.create_bucket("survivor")
        store = open_store(StoreSection(url="s3://survivor/p", endpoint_url=server.url), timeout_s=20)
        store.put("a", b"1", create_only=True)
        server.kill()
        server.start()
        assert store.get("a") == b"1"
        with pytest.raises(ObjectExistsError):
            store.put("a", b"2", create_only=True)
        folders = [keys.parent for keys in (tmp_path / "server").rglob("identities.json")]
        assert folders
        # a name that others know could be a link of theirs
        assert tmp_path / "server" not in folders
        assert [folder for folder in folders if folder.stat().st_mode & 0o077] == []
        assert {path.name for path in (tmp_path / "server").rglob("*.sock")} == {"filer.sock", "s3.sock"}
        files = {path.name for path in (tmp_path / "server/objects").glob("*.dat")}
        with (tmp_path / "server/objects/lock").open("wb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no second server beside this one
        assert files == {"1.dat", "survivor_2.dat"}, "one for the server's own log, and one for the bucket"
    finally:
        server.kill()
    assert not [path for port in server.ports for path in SOCKETS.glob(f"seaweedfs-*-{port}.sock")]


def test_a_damaged_tls_record_in_a_body_is_tried_again_and_is_one_sentence_if_it_stays() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS_FOLDER / "server.crt", TLS_FOLDER / "server.key")
    damaged, num_requests = [True], 0

    def serve(listener: socket.socket) -> None:
        nonlocal num_requests
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with context.wrap_socket(plain, server_side=True) as client:
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += client.recv(65536)
                num_requests += 1
                head = b'HTTP/1.1 200 OK\r\nContent-Length: 4\r\nETag: "1"\r\nConnection: close\r\n\r\n'
                is_whole = not damaged.pop(0) if damaged else True
                client.sendall(head + (b"1234" if is_whole else b"12"))
                if not is_whole:
                    os.write(client.fileno(), b"no record of TLS" * 4)  # beneath TLS

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        url, ca_file = f"https://127.0.0.1:{listener.getsockname()[1]}", str(TLS_FOLDER / "authority.crt")
        place = {"bucket": BUCKET, "prefix": "", "endpoint_url": url, "region": "us-east-1"}
        options: dict[str, Any] = {**place, "ca_file": ca_file}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                patch.setenv(name, "x")
            store = S3Store(**options, timeout_s=60.0)
        assert (store.get("a"), num_requests) == (b"1234", 2)
        damaged[:] = [True] * 1000
        impatient = S3Store(**options, timeout_s=0.5)
        with pytest.raises(StoreUnavailableError, match=r"cannot read a in .*: no answer"):
            impatient.get("a")
