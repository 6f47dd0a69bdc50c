"""`RecordedBuffer` over HTTP on loopback, for trainers that are processes."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tba_trainer.distributed.leader import encode_drawn_batch

from tba.api import AckRequest, BatchRequest, CheckpointRequest, EvalRequest, LineageRequest, RunCommand, VersionRequest
from tba.errors import TbaError
from tba.wire import decode_heartbeat
from tests.support.trainer_values import RecordedBuffer


class RecordedServer:
    """Serves a recorded buffer at `url` until it is closed."""

    def __init__(self, buffer: RecordedBuffer) -> None:
        self.buffer = buffer
        self._server = _Server(("127.0.0.1", 0), _handler(buffer))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="recorded-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a trainer that was killed
            super().handle_error(request, client_address)


def _handler(buffer: RecordedBuffer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, body: bytes) -> None:
            try:
                status, content = 200, _reply(buffer, self.path.partition("?")[0].removeprefix("/v1/"), body)
            except TbaError as error:
                problem = {"type": f"urn:tba:problem:{error.slug}", "status": error.status, "detail": str(error)}
                status, content = error.status, json.dumps(problem).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _reply(buffer: RecordedBuffer, path: str, body: bytes) -> bytes:
    parts = path.split("/")
    match parts:
        case ["run"]:
            reply: Any = buffer.run()
        case ["run", "settings"]:
            reply = buffer.settings()
        case ["run", command]:
            reply = buffer.command(command, RunCommand.model_validate_json(body))
        case ["lineages"]:
            reply = buffer.new_lineage(LineageRequest.model_validate_json(body))
        case ["versions"]:
            reply = buffer.announce_version(VersionRequest.model_validate_json(body))
        case ["checkpoints"]:
            reply = buffer.register_checkpoint(CheckpointRequest.model_validate_json(body))
        case ["batches"]:
            return encode_drawn_batch(buffer.draw_batch(BatchRequest.model_validate_json(body)))
        case ["batches", batch_id, "ack"]:
            reply = buffer.ack(batch_id, AckRequest.model_validate_json(body))
        case ["evals"]:
            reply = buffer.request_eval(EvalRequest.model_validate_json(body))
        case ["evals", eval_id]:
            reply = buffer.get_eval(eval_id)
        case ["heartbeats"]:
            reply = buffer.heartbeat(decode_heartbeat(body))
        case _:
            raise AssertionError(f"no trainer calls {path}")
    return b"" if reply is None else reply.model_dump_json().encode()
