"""A TLS proxy in front of a plain server, such as a Redis without TLS, as a context manager."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path


class TlsProxy:
    """Accepts TLS on a loopback port and forwards all data to a plain server.

    Args:
        port: port of the plain server on loopback.
        cert_file: the certificate that the proxy presents.
        key_file: the key of the certificate.
    """

    def __init__(self, port: int, cert_file: Path, key_file: Path) -> None:
        self._target = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert_file, key_file)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        """Connections made so far, failed ones included."""

    def __enter__(self) -> TlsProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            client = self._context.wrap_socket(plain, server_side=True)
        except OSError:  # a client that does not trust us
            plain.close()
            return
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
    for sock in (source, target):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
