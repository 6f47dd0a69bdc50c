"""Scaling through the Kubernetes API: a real client, a real buffer and Redis, a server that speaks as the API does."""

from __future__ import annotations

import json
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tba_buffer.run.scaling import kubernetes, scaling

from tba.api import RunCommand, ScaleRequest, SearchersInfo
from tba.clients import BufferClient
from tba.errors import ConfigError
from tests.support.buffer import start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.certificates import make_certificate
from tests.support.waits import until

NAME, NAMESPACE = "demo-searcher", "rl"
PATH = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}/scale"
MESSAGES = {
    403: f'deployments.apps "{NAME}" is forbidden: User "system:serviceaccount:rl:demo-buffer" cannot get it',
    500: "etcdserver: request timed out",
}


@dataclass
class KubernetesApi:
    """The server. Attributes may be changed while it serves."""

    folder: Path
    replicas: int = 1
    token: str = "first-token"
    status: int = 200
    """Other than 200: every call is refused with it."""
    body: bytes | None = None
    """Sent instead of the right answer."""
    hang_s: float = 0.0
    """Duration of every answer."""
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    """(method, content type, body) of every call that was let in."""

    def __post_init__(self) -> None:
        certificate, key = make_certificate(self.folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_port
        self.is_closed = False
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def make_account(self, folder: Path) -> Path:
        """A folder as Kubernetes mounts it for a service account."""
        folder.mkdir()
        (folder / "token").write_text(self.token)
        (folder / "namespace").write_text(NAMESPACE)
        (folder / "ca.crt").write_bytes((self.folder / "ca.crt").read_bytes())
        return folder

    @property
    def patched(self) -> list[int]:
        """The replicas of every PATCH, in order."""
        return [body["spec"]["replicas"] for method, _, body in self.calls if method == "PATCH"]

    def close(self) -> None:
        """Stop serving: new connections are refused, and old ones end with their next call."""
        self.is_closed = True
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, token: str, content_type: str, body: Any) -> tuple[int, bytes]:
        """Status and document of the answer to one call."""
        time.sleep(self.hang_s)
        if token != f"Bearer {self.token}":
            return 401, _refusal(401)
        self.calls.append((method, content_type, body))
        if self.body is not None:
            return 200, self.body
        if self.status != 200 or path != PATH:
            return self.status, _refusal(self.status)
        if method == "PATCH":
            self.replicas = body["spec"]["replicas"]
        # the API leaves a number of 0 out
        spec = {"replicas": self.replicas} if self.replicas else {}
        scale = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": NAME}, "spec": spec}
        return 200, json.dumps(scale).encode()


def _refusal(status: int) -> bytes:
    message = MESSAGES.get(status, f'deployments.apps "{NAME}" not found')
    return json.dumps({"kind": "Status", "apiVersion": "v1", "message": message, "code": status}).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or does not trust the certificate, is part of the tests."""


def _handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve("GET")

        def do_PATCH(self) -> None:
            self._serve("PATCH")

        def _serve(self, method: str) -> None:
            if api.is_closed:
                raise ConnectionAbortedError
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            token, content_type = self.headers.get("authorization", ""), self.headers.get("content-type", "")
            status, document = api.answer(method, self.path.partition("?")[0], token, content_type, body)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(document)))
            self.end_headers()
            self.wfile.write(document)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


RECONCILE_S = 0.05


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    api = KubernetesApi(tmp_path / "api")
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT", api.make_account(tmp_path / "account"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
    yield api
    api.close()


@pytest.fixture
def serve(
    api: KubernetesApi, serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., BufferThread]:
    monkeypatch.setattr(scaling, "RECONCILE_S", RECONCILE_S)

    def serve(**scaling: Any) -> BufferThread:
        section = {"backend": "kubernetes", "deployment": NAME, **scaling}
        return serve_buffer(scaling=section)

    return serve


@pytest.fixture
def one_round(serve: Callable[..., BufferThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the replicas once, at the start of a buffer."""
    monkeypatch.setattr(scaling, "RECONCILE_S", 3600.0)


def scale(client: BufferClient, num: int | None) -> SearchersInfo:
    return client.scale(ScaleRequest(num_searchers=num)).searchers


def shown(client: BufferClient) -> SearchersInfo:
    searchers = client.run().searchers
    assert searchers is not None
    return searchers


def test_an_operator_scales_up_and_down_and_what_others_set_is_set_again(
    api: KubernetesApi, serve: Callable[..., BufferThread]
) -> None:
    api.replicas = 1  # the default of Kubernetes for a Deployment that names none
    client = serve(num_searchers=2).client()
    until("the chart's number is set", lambda: api.replicas == 2)
    assert (shown(client).desired, shown(client).source, shown(client).backend) == (2, "recipe", "kubernetes")
    found = scale(client, 4)
    assert (found.desired, found.source, found.note, api.replicas) == (4, "operator", None, 4)
    api.replicas = 5  # helm upgrade
    until("it is set again", lambda: api.replicas == 4)
    assert scale(client, 0).desired == api.replicas == 0
    back = scale(client, None)
    assert (back.desired, back.source, api.replicas) == (2, "recipe", 2)
    assert api.patched == [2, 4, 4, 0, 2]
    kinds = {(method, kind) for method, kind, _ in api.calls}
    assert {method for method, _ in kinds} == {"GET", "PATCH"}
    assert {kind for method, kind in kinds if method == "PATCH"} == {"application/strategic-merge-patch+json"}


def test_what_an_operator_wants_survives_a_restart_of_the_buffer(
    api: KubernetesApi, serve: Callable[..., BufferThread]
) -> None:
    first = serve()
    scale(first.client(), 3)
    first.stop()
    api.replicas = 7
    client = serve().client()
    until("the operator's number is set again", lambda: api.replicas == 3)
    assert (scale(client, None).source, api.replicas) == ("recipe", 2)


@pytest.mark.parametrize("asked", [None, 4])
def test_a_run_that_is_over_needs_no_searchers_and_gets_them_back_when_it_continues(
    api: KubernetesApi, serve: Callable[..., BufferThread], asked: int | None
) -> None:
    api.replicas = 2
    client = serve().client()
    lineage = start_lineage(client)
    if asked is not None:
        scale(client, asked)
    client.command("done", RunCommand(token=lineage.token))
    until("the searchers are released", lambda: api.replicas == 0)
    until("it is shown", lambda: shown(client).source == "run-over")
    found = shown(client)
    assert (found.desired, found.note) == (
        0,
        "the run is done: Deployment 'demo-searcher' in namespace 'rl' is held at 0 replicas "
        "(scaling.scale_down_on_run_end); a trainer that continues the run brings its searchers back",
    )
    start_lineage(client)
    until("they come back", lambda: api.replicas == (asked or 2))
    until("the note is gone", lambda: shown(client).note is None)


def test_a_deployment_is_left_alone_when_it_is_not_to_be_released(
    api: KubernetesApi, serve: Callable[..., BufferThread]
) -> None:
    api.replicas = 2
    client = serve(scale_down_on_run_end=False).client()
    lineage = start_lineage(client)
    client.command("done", RunCommand(token=lineage.token))
    seen = len(api.calls)
    until("it was looked at three times", lambda: len(api.calls) >= seen + 3)
    assert api.patched == []
    assert shown(client).source == "recipe"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, ["token of the buffer's service account", "401"]),
        (403, ["403: deployments.apps", "Role with get and patch on deployments/scale"]),
        (404, [f"of Deployment {NAME!r} in namespace {NAMESPACE!r}", "check scaling.deployment"]),
        (500, ["refused to read", "500: etcdserver: request timed out"]),
    ],
)
def test_every_refusal_is_told_counted_and_outlived(
    api: KubernetesApi, serve: Callable[..., BufferThread], status: int, words: list[str]
) -> None:
    api.status = status
    served = serve()
    client = served.client()
    note = scale(client, 3).note
    assert note is not None
    assert [word for word in words if word not in note] == []
    assert shown(client).note == note
    assert failures(served, str(status)) >= 1
    api.status = 200
    until("it works again", lambda: api.replicas == 3 and shown(client).note is None)


def failures(served: BufferThread, reason: str) -> float:
    """`tba_scaling_failures_total` of one reason."""
    import urllib.request

    with urllib.request.urlopen(f"{served.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    wanted = f'tba_scaling_failures_total{{reason="{reason}"}} '
    return next((float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted)), 0.0)


def test_an_api_that_hangs_delays_the_answer_by_no_more_than_its_deadline(
    api: KubernetesApi, serve: Callable[..., BufferThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "READ_S", 0.2)
    api.hang_s = 1.0
    client = serve().client()
    note = scale(client, 3).note
    assert note is not None
    assert "cannot be reached within 3 s (connection) and 0.2 s (answer)" in note
    api.hang_s = 0.0
    until("it works again", lambda: api.replicas == 3)


def test_an_api_that_is_gone_or_is_none_is_told(api: KubernetesApi, serve: Callable[..., BufferThread]) -> None:
    client = serve().client()
    api.body = b"<html>a proxy says hello</html>"
    note = scale(client, 3).note
    assert note is not None
    assert "gave an answer that cannot be read" in note
    api.body = None
    until("it works again", lambda: api.replicas == 3 and shown(client).note is None)
    api.close()
    # the first call finds the old connection cut, every later one a closed port
    until("it is missed", lambda: re.search(r"cannot be reached .*Connection refused", shown(client).note or ""))


def test_a_certificate_of_somebody_else_is_not_trusted(
    api: KubernetesApi, serve: Callable[..., BufferThread], tmp_path: Path
) -> None:
    certificate, _ = make_certificate(tmp_path / "stranger")
    ours = kubernetes.SERVICE_ACCOUNT / "ca.crt"
    right = ours.read_bytes()
    ours.write_bytes(certificate.read_bytes())
    client = serve().client()
    note = scale(client, 3).note
    assert note is not None
    assert "certificate verify failed" in note
    assert api.calls == []  # not even the token was shown
    ours.write_bytes(right)  # the authority was renewed
    until("it works again", lambda: api.replicas == 3)


def test_a_renewed_token_is_used_at_once(
    api: KubernetesApi, serve: Callable[..., BufferThread], one_round: None
) -> None:
    client = serve().client()
    assert scale(client, 2).note is None
    api.token = "second-token"
    assert "is not accepted" in (scale(client, 3).note or "")
    token = kubernetes.SERVICE_ACCOUNT / "token"
    token.write_text("second-token\n")
    assert scale(client, 4).note is None
    assert api.replicas == 4
    token.write_text("")
    assert "is empty" in (scale(client, 5).note or "")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("environ", "does not run in a pod of a cluster"),
        ("token", "automountServiceAccountToken of the buffer's pod to true"),
        ("package", "install tba-buffer[kubernetes]"),
    ],
)
def test_a_buffer_that_cannot_scale_says_so_at_the_start(
    api: KubernetesApi,
    serve: Callable[..., BufferThread],
    monkeypatch: pytest.MonkeyPatch,
    spoil: str,
    words: str,
) -> None:
    if spoil == "environ":
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    elif spoil == "token":
        (kubernetes.SERVICE_ACCOUNT / "token").unlink()
    else:
        monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ConfigError) as caught:
        serve()
    assert words in str(caught.value)


def test_a_number_above_the_most_is_refused_at_the_start(serve: Callable[..., BufferThread]) -> None:
    with pytest.raises(ConfigError, match=r"num_searchers is 9, above max_searchers 8; raise that one too"):
        serve(num_searchers=9, max_searchers=8)
