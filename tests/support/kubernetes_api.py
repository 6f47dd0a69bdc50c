"""An HTTPS server that answers as the Kubernetes API does about the scale of one Deployment, and can misbehave.

Its documents are those of a real API server (v1.33), with names changed: a Scale without `spec.replicas` where that is
0, and a Status for every refusal.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME, NAMESPACE = "demo-searcher", "rl"
PATH = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}/scale"
USER = "system:serviceaccount:rl:demo-buffer"
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 429: "TooManyRequests"}


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) of a server on 127.0.0.1, its own authority."""
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = folder / "ca.crt", folder / "server.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


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
    """How long every answer takes."""
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
            return 401, _refusal(401, "Unauthorized")
        self.calls.append((method, content_type, body))
        if self.body is not None:
            return 200, self.body
        if self.status != 200:
            return self.status, _refusal(self.status, _MESSAGES.get(self.status, "etcdserver: request timed out"))
        if path != PATH:
            return 404, _refusal(404, f'deployments.apps "{path.split("/")[-2]}" not found')
        if method == "PATCH":
            self.replicas = body["spec"]["replicas"]
        scale = {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {
                "name": NAME,
                "namespace": NAMESPACE,
                "uid": "5e7a3c0e-33a6-4fd1-9a55-3d3c4e0f3b0f",
                "resourceVersion": str(1000 + len(self.calls)),
                "creationTimestamp": "2026-11-22T00:00:00Z",
            },
            "spec": {"replicas": self.replicas} if self.replicas else {},
            "status": {"replicas": self.replicas, "selector": "app.kubernetes.io/component=searcher"},
        }
        return 200, json.dumps(scale).encode()


_MESSAGES = {
    403: f'deployments.apps "{NAME}" is forbidden: User "{USER}" cannot get resource "deployments/scale" in API group '
    f'"apps" in the namespace "{NAMESPACE}"',
    404: f'deployments.apps "{NAME}" not found',
    409: f'Operation cannot be fulfilled on deployments.apps "{NAME}": the object has been modified',
    429: "too many requests, please try again later",
}


def _refusal(status: int, message: str) -> bytes:
    document = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": REASONS.get(status, "InternalError"),
        "code": status,
    }
    return json.dumps(document).encode()


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
