"""Scaling through the Kubernetes API: a real client, a real buffer and Redis, a server that speaks as the API does."""

from __future__ import annotations

import json
import re
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tba_buffer.run import kubernetes

from tba.api import RunCommand, ScaleRequest, SearchersInfo
from tba.clients import BufferClient
from tba.errors import ConfigError
from tests.support import loopback
from tests.support.buffer import start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.certificates import make_certificate
from tests.support.metrics import values
from tests.support.waits import until

NAME, NAMESPACE = "demo-searcher", "rl"
PATH = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}/scale"
MESSAGES = {
    403: f'deployments.apps "{NAME}" is forbidden: User "system:serviceaccount:rl:demo-buffer" cannot get it',
    500: "etcdserver: request timed out",
}


class KubernetesApi(loopback.Server):
    """The server. Attributes may be changed while it serves."""

    block_on_close = False
    replicas, token = 1, "first-token"
    status = 200
    """Other than 200: every call is refused with it."""
    body: bytes | None = None
    """Sent instead of the right answer."""
    hang_s = 0.0
    """Duration of every answer."""

    def __init__(self, folder: Path) -> None:
        certificate, key = make_certificate(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.folder, self.is_closed = folder, False
        self.calls: list[tuple[str, str, Any]] = []
        """(method, content type, body) of every call that was let in."""
        super().__init__(Handler, context=context)

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
        super().close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or does not trust the certificate, is part of the tests."""


class Handler(loopback.Handler):
    server: KubernetesApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        api, method = self.server, self.command
        if api.is_closed:
            raise ConnectionAbortedError
        body: Any = json.loads(self.body() or b"null")
        time.sleep(api.hang_s)
        is_known = self.headers.get("authorization", "") == f"Bearer {api.token}"
        status = 401 if not is_known else api.status if self.path.partition("?")[0] == PATH else 404
        if is_known:
            api.calls.append((method, self.headers.get("content-type", ""), body))
        if status == 200 and method == "PATCH" and api.body is None:
            api.replicas = body["spec"]["replicas"]
        # the API leaves a number of 0 out
        spec = {"replicas": api.replicas} if api.replicas else {}
        document = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": NAME}, "spec": spec}
        if status != 200:
            message = MESSAGES.get(status, f'deployments.apps "{NAME}" not found')
            document = {"kind": "Status", "apiVersion": "v1", "message": message, "code": status}
        self.answer(status, document if api.body is None else api.body, {"content-type": "application/json"})

    do_PATCH = do_GET


Serve = Callable[..., BufferThread]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    api = KubernetesApi(tmp_path / "api")
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT", api.make_account(tmp_path / "account"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server_port))
    yield api
    api.close()


@pytest.fixture
def serve(api: KubernetesApi, serve_buffer: ServeBuffer) -> Serve:
    def serve(every_s: float = 0.05, **section: Any) -> BufferThread:
        scaling = {"backend": "kubernetes", "deployment": NAME, **section}
        return serve_buffer(buffer={"RECONCILE_S": every_s}, scaling=scaling)

    return serve


def scale(client: BufferClient, num: int | None) -> SearchersInfo:
    return client.scale(ScaleRequest(num_searchers=num)).searchers


def shown(client: BufferClient) -> SearchersInfo:
    searchers = client.run().searchers
    assert searchers is not None
    return searchers


def test_an_operator_scales_up_and_down_and_what_others_set_is_set_again(api: KubernetesApi, serve: Serve) -> None:
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
    assert {method for method, _, _ in api.calls} == {"GET", "PATCH"}
    assert {kind for method, kind, _ in api.calls if method == "PATCH"} == {"application/strategic-merge-patch+json"}


def test_what_an_operator_wants_survives_a_restart_of_the_buffer(api: KubernetesApi, serve: Serve) -> None:
    first = serve()
    scale(first.client(), 3)
    first.stop()
    api.replicas = 7
    client = serve().client()
    until("the operator's number is set again", lambda: api.replicas == 3)
    assert (scale(client, None).source, api.replicas) == ("recipe", 2)


@pytest.mark.parametrize("asked", [None, 4])
def test_a_run_that_is_over_needs_no_searchers_and_gets_them_back_when_it_continues(
    api: KubernetesApi, serve: Serve, asked: int | None
) -> None:
    api.replicas = 2
    lineage = start_lineage(client := serve().client())
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


def test_a_deployment_is_left_alone_when_it_is_not_to_be_released(api: KubernetesApi, serve: Serve) -> None:
    api.replicas = 2
    lineage = start_lineage(client := serve(scale_down_on_run_end=False).client())
    client.command("done", RunCommand(token=lineage.token))
    seen = len(api.calls)
    until("it was looked at three times", lambda: len(api.calls) >= seen + 3)
    assert api.patched == []
    assert shown(client).source == "recipe"


@pytest.mark.parametrize(
    ("spoilt", "reason", "words"),
    [
        ({"status": 401}, "401", ["token of the buffer's service account", "401"]),
        ({"status": 403}, "403", ["403: deployments.apps", "Role with get and patch on deployments/scale"]),
        ({"status": 404}, "404", [f"of Deployment {NAME!r} in namespace {NAMESPACE!r}", "check scaling.deployment"]),
        ({"status": 500}, "500", ["refused to read", "500: etcdserver: request timed out"]),
        ({"body": b"<html>a proxy says hello</html>"}, "bad-answer", ["gave an answer that cannot be read"]),
        ({"hang_s": 1.0}, "unreachable", ["cannot be reached within 3 s (connection) and 0.2 s (answer)"]),
    ],
)
def test_every_failure_is_told_counted_and_outlived(
    api: KubernetesApi,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    spoilt: dict[str, Any],
    reason: str,
    words: list[str],
) -> None:
    if "hang_s" in spoilt:
        monkeypatch.setattr(kubernetes, "READ_S", 0.2)
    vars(api).update(spoilt)
    served = serve()
    client = served.client()
    note = scale(client, 3).note or ""
    assert [word for word in words if word not in note] == []
    assert shown(client).note == note
    assert values(served.url, "tba_scaling_failures_total")[(reason,)] >= 1
    vars(api).update(status=200, body=None, hang_s=0.0)
    until("it works again", lambda: api.replicas == 3 and shown(client).note is None)


def test_an_api_that_is_gone_is_missed(api: KubernetesApi, serve: Serve) -> None:
    client = serve().client()
    assert scale(client, 3).note is None
    api.close()
    # the first call finds the old connection cut, every later one a closed port
    until("it is missed", lambda: re.search(r"cannot be reached .*Connection refused", shown(client).note or ""))


def test_a_certificate_of_somebody_else_is_not_trusted(api: KubernetesApi, serve: Serve, tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path / "stranger")
    ours = kubernetes.SERVICE_ACCOUNT / "ca.crt"
    right = ours.read_bytes()
    ours.write_bytes(certificate.read_bytes())
    client = serve().client()
    assert "certificate verify failed" in (scale(client, 3).note or "")
    assert api.calls == []  # not even the token was shown
    ours.write_bytes(right)  # the authority was renewed
    until("it works again", lambda: api.replicas == 3)


def test_a_renewed_token_is_used_at_once(api: KubernetesApi, serve: Serve) -> None:
    client = serve(every_s=3600.0).client()
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
        ("package", "pip install kubernetes"),
    ],
)
def test_a_buffer_that_cannot_scale_says_so_at_the_start(
    api: KubernetesApi, serve: Serve, monkeypatch: pytest.MonkeyPatch, spoil: str, words: str
) -> None:
    if spoil == "environ":
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    elif spoil == "token":
        (kubernetes.SERVICE_ACCOUNT / "token").unlink()
    else:
        monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ConfigError, match=re.escape(words)):
        serve()


def test_a_number_above_the_most_is_refused_at_the_start(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"num_searchers is 9, above max_searchers 8; raise that one too"):
        serve(num_searchers=9, max_searchers=8)
